"""How settings are read: YAML, overrides from the environment, and sections that refuse what they do not know."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, SecretStr, model_validator

from policies.errors import SettingsError

PREFIX = "COUNTERSIGN_"


class _Override(str):
    """Text of an environment variable whose setting decides how to read it."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _read_overrides(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: cls._read_override(str(name), value) for name, value in values.items()}

    @classmethod
    def _read_override(cls, name: str, value: Any) -> Any:
        field = cls.model_fields.get(name)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        # A key such as 0123 would come back from YAML as another number. A list of texts is no text.
        is_text = (str in kinds or SecretStr in kinds) and get_origin(kinds[0]) in (None, Union, UnionType)
        if isinstance(value, _Override):
            return str(value) if is_text else yaml.safe_load(value)
        is_section = any(isinstance(kind, type) and issubclass(kind, Section) for kind in _within(kinds))
        return value if is_section else _plain(value)


def _within(kinds: tuple[Any, ...]) -> list[Any]:
    return [inner for kind in kinds for inner in (kind, *get_args(kind))]


def _plain(value: Any) -> Any:
    """A tree of settings with every override in it read as YAML."""
    if isinstance(value, _Override):
        return yaml.safe_load(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def read_tree(text: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The tree of settings in YAML text, with every `COUNTERSIGN_…` variable put in its place.

    Raises SettingsError, which names the variable or says where the YAML is wrong.
    """
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise SettingsError("countersign.yaml", _yaml_problem(error)) from error
    if not isinstance(tree, dict):
        raise SettingsError("countersign.yaml", "expected a mapping of settings")
    for name in sorted(environ):
        if name.startswith(PREFIX) and name != PREFIX + "CONFIG":
            _check_yaml(name, environ[name])
            _override(tree, name, environ[name])
    return tree


def _check_yaml(name: str, value: str) -> None:
    try:
        yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise SettingsError(name, _yaml_problem(error)) from error


def _yaml_problem(error: yaml.YAMLError) -> str:
    """What is wrong and where, without the line itself, which may hold a secret."""
    mark = getattr(error, "problem_mark", None)
    where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return f"not valid YAML{where}"


def _override(tree: dict[str, Any], name: str, value: str) -> None:
    path = name[len(PREFIX) :].lower().split("__")
    node: Any = tree
    for depth, part in enumerate(path):
        key = _key_of(node, part, name)
        if depth == len(path) - 1:
            node[key] = _Override(value)
            return
        if isinstance(node, dict) and not isinstance(node.get(key), dict | list):
            node[key] = {}
        node = node[key]


def _key_of(node: Any, part: str, name: str) -> str | int:
    if isinstance(node, list):
        if not part.isdigit() or int(part) >= len(node):
            raise SettingsError(name, f"{part!r} is not a position in a list of {len(node)}")
        return int(part)
    return next((key for key in node if str(key).lower() == part), part)
