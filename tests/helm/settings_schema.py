"""The schema of `settings` in the chart's values, from the program's own settings."""

from __future__ import annotations

import json
from typing import Any

from policies.settings import Settings
from tests.helm.forms import NETWORK

OWNED_BY_CHART = frozenset({"host", "port", "redis_url", "embedded_dir"})
IN_SECTIONS_OWNED_BY_CHART = {"AdminSettings": ("host", "port", "keys"), "MetricsSettings": ("host", "port")}
SECRET = frozenset({"keys"})
LARGEST = 2**53
"""Beyond it a number of YAML is no whole one any more."""

Schema = dict[str, Any]


def _needs(name: str, value: str, other: str) -> dict[str, Any]:
    """Where a setting is this, the other one says something."""
    said = {"required": [other], "properties": {other: {"type": "string", "minLength": 1}}}
    return {"if": {"required": [name], "properties": {name: {"const": value}}}, "then": said}


_TOGETHER: dict[str, list[Schema]] = {
    "ReferenceSettings": [_needs("kind", "vllm_engine", "path"), _needs("kind", "vllm_http", "url")],
    "TelemetrySettings": [_needs("traces", "file", "file")],
    "ModelSettings": [
        {
            "if": {"required": [one], "properties": {one: {"not": {"type": "null"}}}},
            "then": {"required": [other], "properties": {other: {"not": {"type": "null"}}}},
        }
        for one, other in (("second_reference", "second_profile"), ("second_profile", "second_reference"))
    ],
}
"""What settings of one section say of each other, as their validators do; numbers are compared by the chart itself
(`countersign.consistent`)."""


def settings() -> tuple[Schema, Schema]:
    """Schema of the settings an operator may put into values, and the definitions it refers to."""
    tree = Settings.model_json_schema()
    definitions = tree.pop("$defs", {})
    for name in OWNED_BY_CHART | SECRET:
        del tree["properties"][name]
    for section, names in IN_SECTIONS_OWNED_BY_CHART.items():
        for name in names:
            del definitions[section]["properties"][name]
    for schema in (tree, *definitions.values()):
        _drop_secrets(schema)
        _drop_prose(schema)
        _refuse_passwords(schema)
        _bound(schema)
    definitions["DeliverySettings"]["properties"]["networks"]["items"]["pattern"] = NETWORK
    for section, rules in _TOGETHER.items():
        definitions[section]["allOf"] = rules
    return tree, {name: value for name, value in definitions.items() if f"/{name}" in json.dumps([tree, definitions])}


def _drop_secrets(schema: Schema) -> None:
    hidden = [name for name, value in schema.get("properties", {}).items() if '"password"' in json.dumps(value)]
    for name in hidden:
        del schema["properties"][name]
    if "required" in schema:
        schema["required"] = [name for name in schema["required"] if name not in hidden]


def _refuse_passwords(schema: Schema) -> None:
    """No URL of the settings may hold a user's password: it would lie in a ConfigMap."""
    for name, value in schema.get("properties", {}).items():
        if name == "url":
            value["not"] = {"type": "string", "pattern": "://[^/?#]*@"}


def _bound(node: Any) -> None:
    """Every whole number has an end."""
    if isinstance(node, dict):
        if node.get("type") == "integer" and not {"maximum", "exclusiveMaximum"} & node.keys():
            node["maximum"] = LARGEST
        for value in node.values():
            _bound(value)
    elif isinstance(node, list):
        for value in node:
            _bound(value)


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
