"""How settings are read: YAML, overrides from the environment, and sections that refuse what they do not know."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, SecretStr, model_validator

from policies.errors import SettingsError

PREFIX = "COUNTERSIGN_"
_FILE = "countersign.yaml"


class _Override(str):
    """Text of an environment variable; its setting decides how to read it."""

    variable: str

    def parsed(self) -> Any:
        """Read as YAML. Raises SettingsError, which names the variable."""
        return _yaml(self, self.variable)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _read_overrides(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        return {name: _read(value, kinds.get(name, Any)) for name, value in values.items()}


def _read(value: Any, kind: Any) -> Any:
    """A setting of this kind with every override in it read; those of sections in it are left to the sections."""
    kinds = _alternatives(kind)
    if isinstance(value, _Override):
        # A key such as 0123, [abc or null is no number, list or nothing where text belongs.
        return str(value) if all(map(_is_text, kinds)) else value.parsed()
    if isinstance(value, dict):
        if any(isinstance(each, type) and issubclass(each, Section) for each in kinds):
            return value
        return {name: _read(item, _inner(kinds, dict)) for name, item in value.items()}
    if isinstance(value, list):
        return [_read(item, _inner(kinds, list, tuple)) for item in value]
    return value


def _alternatives(kind: Any) -> list[Any]:
    """The kinds that a value of this kind may have, but none at all."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _alternatives(arguments[0])
    if origin in (Union, UnionType):
        return [inner for each in arguments if each is not type(None) for inner in _alternatives(each)]
    return [kind]


def _is_text(kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return all(isinstance(each, str) for each in get_args(kind))
    return kind in (str, SecretStr)


def _inner(kinds: list[Any], *containers: type) -> Any:
    """The kind of what such a container holds; anything where nothing says."""
    return next(
        (get_args(kind)[-1 if dict in containers else 0] for kind in kinds if get_origin(kind) in containers), Any
    )


def read_tree(text: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The tree of settings in YAML text, with every `COUNTERSIGN_…` variable put in its place.

    Raises SettingsError, which names the variable or says where the YAML is wrong.
    """
    tree = _yaml(text, _FILE) or {}
    if not isinstance(tree, dict):
        raise SettingsError(_FILE, "expected a mapping of settings")
    for name in sorted(environ):
        if name.startswith(PREFIX) and name != PREFIX + "CONFIG":
            _override(tree, name, environ[name])
    return tree


def says_nothing(text: str) -> bool:
    """Whether there is no setting in YAML text. Raises SettingsError."""
    return not _yaml(text, _FILE)


def _yaml(text: str, name: str) -> Any:
    """What YAML text says. Raises SettingsError without the text itself, which may hold a secret."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node, "" if name == _FILE else name, (), set())
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise SettingsError(name, f"not valid YAML{where}") from error
    except (ValueError, OverflowError, RecursionError) as error:
        # Of what looks like a date or a number and is none, and of a thousand brackets.
        raise SettingsError(name, f"not valid YAML ({type(error).__name__})") from error


def _check(node: yaml.Node, where: str, inside: tuple[yaml.Node, ...], known: set[int]) -> None:
    """Raises SettingsError for what YAML lets pass, and no settings can mean: a key that is there twice, one of which
    would go unread, and what holds itself.

    Args:
        where: the node's name in the settings. inside: the nodes that hold it.
        known: those that were looked at before, by `id`.
    """
    if any(node is each for each in inside):
        raise SettingsError(where or _FILE, "holds itself")
    if id(node) in known or isinstance(node, yaml.ScalarNode):
        return
    known.add(id(node))
    before, inside = f"{where}." if where else "", (*inside, node)
    if isinstance(node, yaml.SequenceNode):
        for at, item in enumerate(node.value):
            _check(item, f"{before}{at}", inside, known)
        return
    names = set[str]()
    for key, value in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else "?"
        if name in names and name != "?":
            raise SettingsError(before + name, f"is there twice, the second time in line {key.start_mark.line + 1}")
        names.add(name)
        _check(value, before + name, inside, known)


def _override(tree: dict[str, Any], name: str, value: str) -> None:
    path = name[len(PREFIX) :].lower().split("__")
    node: Any = tree
    for depth, part in enumerate(path):
        key = _key_of(node, part, name)
        if depth == len(path) - 1:
            node[key] = _Override(value)
            node[key].variable = name
            return
        inner = node.get(key) if isinstance(node, dict) else node[key]
        if isinstance(inner, _Override):
            inner = inner.parsed()
        node[key] = inner if isinstance(inner, dict | list) else {}
        node = node[key]


def _key_of(node: Any, part: str, name: str) -> str | int:
    if isinstance(node, list):
        if not part.isdecimal() or int(part) >= len(node):
            raise SettingsError(name, f"{part!r} is not a position in a list of {len(node)}")
        return int(part)
    return next((key for key in node if str(key).lower() == part), part)
