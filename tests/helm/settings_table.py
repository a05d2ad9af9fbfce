"""The part of the table of values that lies under `settings`: names, defaults and forms from the program's schema, what
they are from the docstrings of its sections."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from policies._sections import Section
from tests.helm.settings_schema import Schema, settings

Row = tuple[str, Any, Schema, str]


def rows() -> Iterator[Row]:
    """Dotted name, default, schema and description of everything that may be set; `NAME` stands for a name of the
    operator's, `N` for a position in a list. A default of None is none."""
    tree, definitions = settings()
    yield from _below("settings", tree, definitions, _told("Settings"))


def _below(
    path: str, form: Schema, definitions: Schema, told: dict[str, str]
) -> Iterator[tuple[str, Any, Schema, str]]:
    for name, value in form.get("properties", {}).items():
        below = f"{path}.{name}"
        inner, section = _section(value, definitions)
        if section is None:
            yield below, value.get("default"), value, told.get(name, "")
        else:
            yield from _below(below + inner, definitions[section], definitions, _told(section))


def _section(form: Schema, definitions: Schema) -> tuple[str, str | None]:
    """What goes between a key and the keys of its section, and the section's name; none where it is a plain value."""
    for one in form.get("anyOf", [form]):
        for inner, found in (("", one), (".NAME", one.get("additionalProperties")), (".N", one.get("items"))):
            name = found.get("$ref", "").rpartition("/")[2] if isinstance(found, dict) else ""
            if "properties" in definitions.get(name, {}):
                return inner, name
    return "", None


def _told(section: str) -> dict[str, str]:
    """What the docstring of a section says of its keys, and the keys' own descriptions."""
    own = _classes(Section)[section]
    told = {name: field.description for name, field in own.model_fields.items() if field.description}
    listed = (own.__doc__ or "").partition("Attributes:\n")[2]
    for names, text in re.findall(r"^ {8}(\w[\w, ]*): (.*(?:\n {9,}.*)*)", listed, re.MULTILINE):
        for name in names.split(", "):
            told[name] = " ".join(text.split())
    return told


def _classes(base: type[Section]) -> dict[str, type[Section]]:
    found = {base.__name__: base}
    for each in base.__subclasses__():
        found |= _classes(each)
    return found
