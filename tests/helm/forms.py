"""Pieces of the chart's schema whose form is Kubernetes': labels, and rules of a NetworkPolicy.

The API server drops a key that it does not know, and a rule without any lets everything through: so they are closed.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

OWN_LABELS = (
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/component",
    "app.kubernetes.io/version",
    "app.kubernetes.io/managed-by",
    "helm.sh/chart",
    "countersign/model",
)
"""Those that the chart sets, and finds its own pods by."""

_OCTET = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
_CIDR = (
    rf"^(({_OCTET}\.){{3}}{_OCTET}/(3[0-2]|[12]?[0-9])|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$"
)
NETWORK = _CIDR.replace("/(3[0-2]|[12]?[0-9])", "(/(3[0-2]|[12]?[0-9]))?").replace(
    "/(12[0-8]|1[01][0-9]|[1-9]?[0-9])", "(/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))?"
)
"""A network, or one address."""
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}


def closed(properties: Schema, **more: Any) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties, **more}


_NAME = "([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)"
_KEY = rf"^([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_NAME}$"


def labels(*, own: bool = False) -> Schema:
    """Labels; besides the chart's own, unless they are another object's."""
    refused = {} if own else {"not": {"enum": list(OWN_LABELS)}}
    return {
        "type": "object",
        "propertyNames": {"pattern": _KEY, **refused},
        "additionalProperties": {"type": "string", "pattern": f"^{_NAME}?$"},
    }


def annotated() -> Schema:
    """Annotations: names as of labels, and any text."""
    return {"type": "object", "propertyNames": {"pattern": _KEY}, "additionalProperties": {"type": "string"}}


def network_policy() -> Schema:
    """Who may talk to whom."""
    egress, peers = _list({"$ref": "#/$defs/EgressRule"}), _list({"$ref": "#/$defs/Peer"})
    ports = _list(_PORT) | {"minItems": 1}
    return closed(
        {
            "enabled": {"type": "boolean"},
            "proxy": closed({"from": peers, "egress": egress}),
            "admin": closed({"from": peers}),
            "worker": closed({"egress": egress}),
            "reference": closed({"egress": egress}),
            "webhooks": closed({"egress": egress}),
            "monitoring": closed({"from": peers}),
            "collector": closed({"ports": ports, "to": peers}),
            "dns": closed({"to": peers}),
            "redis": closed({"ports": ports, "to": peers}),
        }
    )


def definitions() -> Schema:
    """What the rules refer to."""
    return {"EgressRule": _egress(), "Peer": _peer()}


def _list(form: Schema) -> Schema:
    return {"type": "array", "items": form}


def _egress() -> Schema:
    port = {
        "port": {"anyOf": [_PORT, {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 15}]},
        "protocol": {"enum": ["TCP", "UDP", "SCTP"]},
        "endPort": _PORT,
    }
    return closed({"to": _list({"$ref": "#/$defs/Peer"}), "ports": _list(closed(port))})


def _peer() -> Schema:
    address = {"type": "string", "pattern": _CIDR}
    block = closed({"cidr": address, "except": _list(address)}, required=["cidr"])
    selector = {"namespaceSelector": _selector(), "podSelector": _selector()}
    return {"anyOf": [closed({"ipBlock": block}, required=["ipBlock"]), closed(selector, minProperties=1)]}


def _selector() -> Schema:
    text = {"type": "string", "minLength": 1}
    expression = {
        "key": text,
        "operator": {"enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
        "values": _list({"type": "string"}),
    }
    return closed(
        {
            "matchLabels": {"type": "object", "additionalProperties": {"type": "string"}},
            "matchExpressions": _list(closed(expression, required=["key", "operator"])),
        }
    )
