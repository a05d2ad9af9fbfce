"""The chart's `values.schema.json`: our own keys by hand, `settings` from the program's settings.

`python -m tests.helm.schema` writes the file anew, and with it the README's table and that of
docs/settings.md; tests fail when they are stale.
Secrets, and what the chart sets itself, are left out of `settings`, so that neither can end up in a ConfigMap.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from policies.checks import VerdictWord
from tests.helm.forms import Schema, annotated, closed, labels, network_policy
from tests.helm.forms import definitions as network_definitions
from tests.helm.settings_schema import settings

CHART = Path(__file__).resolve().parents[2] / "helm"
SCHEMA = CHART / "values.schema.json"

_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "pattern": r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", "maxLength": 253}
_LABEL: Schema = {"type": "string", "pattern": r"^([a-z]([-a-z0-9]*[a-z0-9])?)?$", "maxLength": 53}
_BOOL: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([KMGTP]i?|m)?$"}
_FREE: Schema = {"type": "object"}
_LIST: Schema = {"type": "array", "items": {"type": "object"}}
_POSITIVE: Schema = {"type": "integer", "minimum": 1}
_SHARE: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
_DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|[smhd]))+$"}
_KEY: Schema = {"type": "string", "pattern": "^[-._a-zA-Z0-9]+$"}


def build() -> Schema:
    """The whole schema, JSON Schema 2020-12."""
    tree, definitions = settings()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **closed(_values() | {"settings": tree}),
        "$defs": definitions | network_definitions(),
    }


def _values() -> Schema:
    return {
        "global": _FREE,
        "nameOverride": _LABEL,
        "fullnameOverride": _LABEL,
        "imagePullSecrets": {"type": "array", "items": closed({"name": _NAME}, required=["name"])},
        "commonLabels": labels(),
        "image": closed({"proxy": _image(), "verifier": _image()}),
        "files": {
            "type": "object",
            "propertyNames": {"pattern": r"^[-._a-zA-Z0-9]+$", "not": {"const": "countersign.yaml"}},
            "additionalProperties": {"type": "string"},
        },
        "settingsChange": {"enum": ["restart", "live"]},
        "existingSecret": _NAME,
        "redis": _redis(),
        "models": closed({"existingClaim": _NAME, "mountPath": {"type": "string", "pattern": "^/"}}),
        "proxy": _proxy(),
        "allInOne": _BOOL,
        "worker": _drainer({"processes": _POSITIVE, "autoscaling": _scaling("waiting", least=1)}),
        "reference": _reference(),
        "webhooks": _drainer({}),
        "serviceAccount": closed({"create": _BOOL, "name": _NAME, "annotations": annotated()}),
        "podDisruptionBudget": closed(
            {
                "enabled": _BOOL,
                "maxUnavailable": {
                    "anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^[0-9]+%$"}]
                },
            }
        ),
        "topologySpread": {"type": "array", "items": _spread()},
        "monitoring": _monitoring(),
        "test": _test(),
        "networkPolicy": network_policy(),
    }


def _image() -> Schema:
    return closed(
        {
            "repository": {"type": "string", "pattern": "^[a-z0-9]+([._:/-]+[a-z0-9]+)*$"},
            "tag": {"type": "string", "pattern": "^([A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?$"},
            "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
            "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
        }
    )


def _redis() -> Schema:
    bundled = {
        "image": _image(),
        "maxmemory": {"type": "string", "pattern": "^[0-9]+(kb|mb|gb)$"},
        "persistence": closed({"enabled": _BOOL, "size": _QUANTITY, "storageClass": _TEXT}),
        "resources": _resources(),
    }
    return closed(
        {
            "existingSecret": _NAME,
            "existingSecretKey": _KEY,
            "bundled": closed(bundled),
        }
    )


def _pods() -> Schema:
    return {
        "replicas": _COUNT,
        "existingSecret": _NAME,
        "env": {"type": "array", "items": _env()},
        "resources": _resources(),
        "podAnnotations": annotated(),
        "podLabels": labels(),
        "nodeSelector": labels(own=True),
        "tolerations": {"type": "array", "items": _toleration()},
        "affinity": closed({"nodeAffinity": _FREE, "podAffinity": _FREE, "podAntiAffinity": _FREE}),
        "priorityClassName": _NAME,
    }


def _resources() -> Schema:
    amounts = {"type": "object", "additionalProperties": {"anyOf": [_QUANTITY, {"type": "number", "minimum": 0}]}}
    return closed({"requests": amounts, "limits": amounts, "claims": _LIST})


def _toleration() -> Schema:
    return closed(
        {
            "key": _TEXT,
            "operator": {"enum": ["Exists", "Equal"]},
            "value": _TEXT,
            "effect": {"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
            "tolerationSeconds": {"type": "integer"},
        }
    )


def _spread() -> Schema:
    """One constraint, without the selector, which is the chart's."""
    own = {
        "topologyKey": {"type": "string", "minLength": 1},
        "maxSkew": _POSITIVE,
        "whenUnsatisfiable": {"enum": ["ScheduleAnyway", "DoNotSchedule"]},
        "minDomains": _POSITIVE,
    }
    return closed(own, required=["topologyKey", "maxSkew", "whenUnsatisfiable"])


def _scaling(target: str, least: int) -> Schema:
    """Bounds of an autoscaler, and what one pod should have of what it goes by."""
    bounds = {"minReplicas": {"type": "integer", "minimum": least}, "maxReplicas": _POSITIVE}
    return closed({"enabled": _BOOL, **bounds, target: _POSITIVE, "scaleDownSeconds": _COUNT | {"maximum": 3600}})


def _monitoring() -> Schema:
    shares = dict.fromkeys(("rejectShare", "coverageShare", "errorShare", "backlogShare"), _SHARE)
    seconds = {"lagSeconds": _POSITIVE, "storeSeconds": {"type": "number", "exclusiveMinimum": 0}}
    rules = {"enabled": _BOOL, "labels": labels(), **shares, **seconds}
    scrape = {"enabled": _BOOL, "interval": _DURATION, "labels": labels()}
    prometheus = {
        "url": {"type": "string", "pattern": "^(https?://[^@]+)?$"},
        "triggerAuthentication": _NAME,
        "authModes": _TEXT,
        "selector": {"type": "string", "pattern": '^([a-zA-Z_][a-zA-Z0-9_]*(=|!=|=~|!~)"[^"{}]*"(, ?|$))*$'},
    }
    return closed(
        {
            "credentials": closed({"existingSecret": _NAME, "existingSecretKey": _KEY}),
            "serviceMonitor": closed(scrape),
            "podMonitor": closed(scrape | {"port": _PORT | {"minimum": 1024}}),
            "rules": closed(rules),
            "dashboard": closed({"enabled": _BOOL, "labels": labels(), "annotations": annotated()}),
            "prometheus": closed(prometheus),
        }
    )


def _test() -> Schema:
    words = {"enum": [str(word) for word in VerdictWord]}
    return closed(
        {
            "existingSecret": _NAME,
            "existingSecretKey": _KEY,
            "model": _TEXT,
            "verdicts": {"type": "array", "items": words, "minItems": 1, "uniqueItems": True},
            "waitSeconds": {"type": "integer", "minimum": 10},
        }
    )


_OWNED = "CONFIG|HOST|PORT|REDIS_URL|ADMIN|ADMIN__(HOST|PORT|KEYS)|METRICS|METRICS__(HOST|PORT|TOKEN)"
"""Settings that other values of the chart decide; the sections as a whole too, which would replace what it sets."""


def _env() -> Schema:
    """One variable. Those that carry secrets must come by reference; what the chart sets stays the chart's.

    The program reads whole sections from one variable, so a secret may also hide in the text of `COUNTERSIGN_BACKENDS`.
    """
    name = {"type": "string", "minLength": 1, "not": {"pattern": f"^(HOME|COUNTERSIGN_({_any_case(_OWNED)}))$"}}
    words = "API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|SECRET|TOKEN|PASSW|CREDENTIAL|REDIS_URL|HEADERS"
    words += "|COUNTERSIGN_(ADMIN__)?KEYS|(ENCRYPTION|SIGNING)_KEYS(__|$)"
    token = f"(^|[^_a-zA-Z]){_any_case('TOKEN')}[\"']?\\s*:|{_any_case('(ENCRYPTION|SIGNING)_KEYS')}[\"']?\\s*:"
    inside = f"({_any_case('API_KEY|SECRET|SHA256')})|{token}|://[^/?#]*@"
    return {
        **closed({"name": name, "value": _TEXT | {"not": {"pattern": inside}}, "valueFrom": _FREE}, required=["name"]),
        "if": {"properties": {"name": {"pattern": f"({_any_case(words)})"}}},
        "then": {"required": ["valueFrom"], "not": {"required": ["value"]}},
    }


def _any_case(words: str) -> str:
    return "".join(f"[{letter}{letter.lower()}]" if letter.isalpha() else letter for letter in words)


def _proxy() -> Schema:
    service = {
        "type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
        "port": _PORT,
        "annotations": annotated(),
    }
    unprivileged = _PORT | {"minimum": 1024}
    admin = {
        "enabled": _BOOL,
        "port": unprivileged,
        "existingSecret": _NAME,
        "existingSecretKey": _KEY,
        "service": closed({"port": _PORT, "annotations": annotated()}),
    }
    needed = {
        "if": {"properties": {"enabled": {"const": True}}, "required": ["enabled"]},
        "then": {"properties": {"existingSecret": {"minLength": 1}}},
    }
    own = {
        "port": unprivileged,
        "drainSeconds": _COUNT,
        "service": closed(service),
        "admin": closed(admin, **needed),
    }
    return closed(_pods() | own | {"autoscaling": _scaling("inFlight", least=1)})


def _drainer(own: Schema) -> Schema:
    """Pods that take work from queues."""
    startup = {"type": "integer", "minimum": 30}
    return closed(_pods() | {"enabled": _BOOL, "startupSeconds": startup} | own)


def _reference() -> Schema:
    own = {
        "gpu": closed({"count": _COUNT, "resource": {"type": "string", "pattern": "^[a-z0-9.-]+/[a-zA-Z0-9._-]+$"}}),
        "autoscaling": _scaling("waiting", least=0),
        "sharedMemory": _QUANTITY,
        "scratch": _QUANTITY,
        "cacheClaim": _NAME,
        "runtimeClassName": _NAME,
    }
    one = _drainer(own)
    del one["properties"]["enabled"]
    one = one | {"properties": one["properties"] | {"second": one}}
    return _drainer(own | {"perModel": {"type": "object", "additionalProperties": one}})


def text() -> str:
    """What the committed file should hold."""
    return json.dumps(build(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(text(), encoding="utf-8")
    for pages in ("tests.helm.table", "tests.helm.settings_table"):
        subprocess.run([sys.executable, "-m", pages], check=True)
