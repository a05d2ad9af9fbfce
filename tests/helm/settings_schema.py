"""The schema of `settings` in the chart's values, from the program's own settings."""

from __future__ import annotations

import json
from typing import Any

from policies.settings import Settings

OWNED_BY_CHART = frozenset({"host", "port", "redis_url", "embedded_dir"})
IN_SECTIONS_OWNED_BY_CHART = {"AdminSettings": ("host", "port", "keys"), "MetricsSettings": ("host", "port")}
SECRET = frozenset({"keys"})

Schema = dict[str, Any]


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
