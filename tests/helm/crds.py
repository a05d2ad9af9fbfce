"""Schemas of what the chart makes of other people's resources: those of KEDA and of the Prometheus operator.

Kubernetes' own schemas know nothing of them. These are closed, so they hold the fields that the chart uses and no more;
types and names are those of keda.sh/v1alpha1 and monitoring.coreos.com/v1.
"""

from __future__ import annotations

from typing import Any

import jsonschema

from tests.helm.forms import closed

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|[smhdwy]))+$"}
_PROMETHEUS = ("serverAddress", "query", "threshold", "activationThreshold", "ignoreNullValues", "authModes")


def _all(properties: Schema) -> Schema:
    """A closed object that needs everything it may have."""
    return closed(properties, required=list(properties))


def _resource(version: str, spec: Schema) -> Schema:
    metadata = closed({"name": _TEXT, "labels": _STRINGS}, required=["name"])
    return _all({"apiVersion": {"const": version}, "kind": _TEXT, "metadata": metadata, "spec": spec})


def _scaled_object() -> Schema:
    policy = _all({"type": {"enum": ["Pods", "Percent"]}, "value": _COUNT, "periodSeconds": _COUNT})
    down = _all({"stabilizationWindowSeconds": _COUNT, "policies": {"type": "array", "items": policy}})
    trigger = closed(
        {
            "type": {"const": "prometheus"},
            "metricType": {"enum": ["AverageValue", "Value"]},
            "authenticationRef": _all({"name": _TEXT}),
            "metadata": closed(
                # All of a trigger's metadata is text, numbers too.
                dict.fromkeys(
                    ("serverAddress", "query", "threshold", "activationThreshold", "ignoreNullValues", "authModes"),
                    _TEXT,
                ),
                required=["serverAddress", "query", "threshold"],
            ),
        },
        required=["type", "metadata"],
    )
    return _all(
        {
            "scaleTargetRef": _all({"name": _TEXT}),
            "minReplicaCount": _COUNT,
            "maxReplicaCount": _COUNT,
            "pollingInterval": _COUNT,
            "cooldownPeriod": _COUNT,
            "advanced": _all({"horizontalPodAutoscalerConfig": _all({"behavior": _all({"scaleDown": down})})}),
            "triggers": {"type": "array", "items": trigger, "minItems": 1},
        }
    )


def _endpoint(**more: Schema) -> Schema:
    credentials = _all({"name": _TEXT, "key": _TEXT})
    own = {
        "port": _TEXT,
        "path": _TEXT,
        "interval": _DURATION,
        "authorization": _all({"type": {"const": "Bearer"}, "credentials": credentials}),
    }
    return closed(own | more, required=["port"])


def _service_monitor() -> Schema:
    selector = _all({"matchLabels": _STRINGS})
    return _all({"selector": selector, "endpoints": {"type": "array", "items": _endpoint(), "minItems": 1}})


def _pod_monitor() -> Schema:
    relabeling = _all({"targetLabel": _TEXT, "replacement": _TEXT})
    endpoint = _endpoint(relabelings={"type": "array", "items": relabeling})
    values = {"type": "array", "items": _TEXT, "minItems": 1}
    expression = _all({"key": _TEXT, "operator": {"enum": ["In"]}, "values": values})
    selector = _all({"matchLabels": _STRINGS, "matchExpressions": {"type": "array", "items": expression}})
    return _all({"selector": selector, "podMetricsEndpoints": {"type": "array", "items": endpoint, "minItems": 1}})


def _prometheus_rule() -> Schema:
    rule = closed(
        {"alert": _TEXT, "expr": _TEXT, "for": _DURATION, "labels": _STRINGS, "annotations": _STRINGS},
        required=["alert", "expr"],
    )
    group = _all({"name": _TEXT, "rules": {"type": "array", "items": rule, "minItems": 1}})
    return _all({"groups": {"type": "array", "items": group}})


SCHEMAS: dict[str, Schema] = {
    "ScaledObject": _resource("keda.sh/v1alpha1", _scaled_object()),
    "PodMonitor": _resource("monitoring.coreos.com/v1", _pod_monitor()),
    "ServiceMonitor": _resource("monitoring.coreos.com/v1", _service_monitor()),
    "PrometheusRule": _resource("monitoring.coreos.com/v1", _prometheus_rule()),
}


def validate(item: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError."""
    jsonschema.validate(item, SCHEMAS[item["kind"]])
