"""YAML blocks: settings, whole or in part, values of the chart, or objects of Kubernetes."""

from __future__ import annotations

from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from policies.settings import Settings, parse_settings
from tests.docs.pages import Block
from tests.helm import schema

SECRETS = {"metrics": {"COUNTERSIGN_METRICS__TOKEN": "0" * 40}}
"""Variables that a section needs beside what a file may hold."""


def check(block: Block) -> None:
    """Raises where the block is none of them, or names what is not there."""
    for tree in yaml.safe_load_all(block.text):
        assert isinstance(tree, dict), block.where
        if "apiVersion" in tree:
            kubernetes_validate.validate(tree, "1.33", strict=True)
        elif set(tree) <= set(Settings.model_fields):
            _settings(tree)
        else:
            jsonschema.Draft202012Validator(schema.build()).validate(tree)
            _settings(tree.get("settings", {}))


def _settings(tree: dict[str, Any]) -> None:
    """A part may name models that it does not declare."""
    models = {str(backend.get("model")): {} for backend in tree.get("backends", [])} | (tree.get("models") or {})
    variables = {name: value for section in tree for name, value in SECRETS.get(section, {}).items()}
    parse_settings(yaml.safe_dump(tree | {"models": models}), variables)
