"""The chart's `values.schema.json`: our own keys by hand, `settings` from the program's settings.

`python -m tests.helm.schema` writes the file anew; a test fails when it is stale. Secrets, and what the
chart sets itself, are left out of `settings`, so that neither can end up in a ConfigMap.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from policies.settings import Settings

CHART = Path(__file__).resolve().parents[2] / "helm"
SCHEMA = CHART / "values.schema.json"

OWNED_BY_CHART = frozenset({"host", "port", "redis_url", "embedded_dir"})
SECRET = frozenset({"keys"})

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "pattern": r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", "maxLength": 253}
_BOOL: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([KMGTP]i?|m)?$"}
_FREE: Schema = {"type": "object"}
_LIST: Schema = {"type": "array", "items": {"type": "object"}}
_STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def build() -> Schema:
    """The whole schema, JSON Schema 2020-12."""
    settings, definitions = _settings()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_closed(_values() | {"settings": settings}),
        "$defs": definitions,
    }


def _closed(properties: Schema, **more: Any) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties, **more}


def _values() -> Schema:
    return {
        "global": _FREE,
        "nameOverride": _NAME,
        "fullnameOverride": _NAME,
        "imagePullSecrets": {"type": "array", "items": _closed({"name": _NAME}, required=["name"])},
        "commonLabels": _STRINGS,
        "image": _closed({"proxy": _image(), "verifier": _image()}),
        "files": {
            "type": "object",
            "propertyNames": {"pattern": r"^[-._a-zA-Z0-9]+$", "not": {"const": "countersign.yaml"}},
            "additionalProperties": {"type": "string"},
        },
        "existingSecret": _NAME,
        "redis": _redis(),
        "models": _closed({"existingClaim": _NAME, "mountPath": {"type": "string", "pattern": "^/"}}),
        "proxy": _proxy(),
        "allInOne": _BOOL,
        "worker": _drainer({"processes": {"type": "integer", "minimum": 1}}),
        "reference": _reference(),
        "webhooks": _drainer({}),
        "serviceAccount": _closed({"create": _BOOL, "name": _NAME, "annotations": _STRINGS}),
        "podDisruptionBudget": _closed(
            {
                "enabled": _BOOL,
                "maxUnavailable": {
                    "anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^[0-9]+%$"}]
                },
            }
        ),
        "networkPolicy": _closed(
            {
                "enabled": _BOOL,
                "proxy": _closed({"from": _LIST, "egress": _LIST}),
                "worker": _closed({"egress": _LIST}),
                "reference": _closed({"egress": _LIST}),
                "webhooks": _closed({"egress": _LIST}),
                "redis": _closed({"ports": {"type": "array", "items": _PORT, "minItems": 1}, "to": _LIST}),
            }
        ),
    }


def _image() -> Schema:
    return _closed(
        {
            "repository": {"type": "string", "minLength": 1},
            "tag": _TEXT,
            "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
            "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
        }
    )


def _redis() -> Schema:
    bundled = {
        "image": _image(),
        "maxmemory": {"type": "string", "pattern": "^[0-9]+(kb|mb|gb)$"},
        "persistence": _closed({"enabled": _BOOL, "size": _QUANTITY, "storageClass": _TEXT}),
        "resources": _FREE,
    }
    return _closed(
        {
            "existingSecret": _NAME,
            "existingSecretKey": {"type": "string", "minLength": 1},
            "bundled": _closed(bundled),
        }
    )


def _pods() -> Schema:
    return {
        "replicas": _COUNT,
        "existingSecret": _NAME,
        "env": {"type": "array", "items": _env()},
        "resources": _closed({"requests": _FREE, "limits": _FREE, "claims": _LIST}),
        "podAnnotations": _STRINGS,
        "podLabels": _STRINGS,
        "nodeSelector": _STRINGS,
        "tolerations": _LIST,
        "affinity": _FREE,
        "priorityClassName": _NAME,
    }


def _env() -> Schema:
    """One variable. Those that carry secrets must come by reference; what the chart sets stays the chart's."""
    name = {"type": "string", "minLength": 1, "not": {"pattern": "^COUNTERSIGN_(CONFIG|HOST|PORT)$"}}
    secret = r"(API_KEY|SECRET|TOKEN|PASSWORD|REDIS_URL|COUNTERSIGN_KEYS)"
    return {
        **_closed({"name": name, "value": _TEXT, "valueFrom": _FREE}, required=["name"]),
        "if": {"properties": {"name": {"pattern": secret}}},
        "then": {"required": ["valueFrom"], "not": {"required": ["value"]}},
    }


def _proxy() -> Schema:
    service = {
        "type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
        "port": _PORT,
        "annotations": _STRINGS,
    }
    unprivileged = _PORT | {"minimum": 1024}
    return _closed(_pods() | {"port": unprivileged, "drainSeconds": _COUNT, "service": _closed(service)})


def _drainer(own: Schema) -> Schema:
    """Pods that take work from queues."""
    startup = {"type": "integer", "minimum": 30}
    return _closed(_pods() | {"enabled": _BOOL, "startupSeconds": startup} | own)


def _reference() -> Schema:
    own = {
        "gpu": _closed({"count": _COUNT, "resource": {"type": "string", "pattern": "^[a-z0-9.-]+/[a-zA-Z0-9._-]+$"}}),
        "sharedMemory": _QUANTITY,
        "scratch": _QUANTITY,
        "cacheClaim": _NAME,
        "runtimeClassName": _NAME,
    }
    one = _drainer(own)
    del one["properties"]["enabled"]
    one = one | {"properties": one["properties"] | {"second": one}}
    return _drainer(own | {"perModel": {"type": "object", "additionalProperties": one}})


def _settings() -> tuple[Schema, Schema]:
    """Schema of the settings an operator may put into values, and the definitions it refers to."""
    tree = Settings.model_json_schema()
    definitions = tree.pop("$defs", {})
    for name in OWNED_BY_CHART | SECRET:
        del tree["properties"][name]
    for schema in (tree, *definitions.values()):
        _drop_secrets(schema)
        _drop_prose(schema)
    return tree, {name: value for name, value in definitions.items() if f"/{name}" in json.dumps([tree, definitions])}


def _drop_secrets(schema: Schema) -> None:
    hidden = [name for name, value in schema.get("properties", {}).items() if '"password"' in json.dumps(value)]
    for name in hidden:
        del schema["properties"][name]
    if "required" in schema:
        schema["required"] = [name for name in schema["required"] if name not in hidden]


def _drop_prose(node: Any) -> None:
    """Docstrings and generated titles are for readers of the code."""
    if isinstance(node, dict):
        for word in ("title", "description"):
            if isinstance(node.get(word), str):
                del node[word]
        for value in node.values():
            _drop_prose(value)
    elif isinstance(node, list):
        for value in node:
            _drop_prose(value)


def text() -> str:
    """What the committed file should hold."""
    return json.dumps(build(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(text(), encoding="utf-8")
