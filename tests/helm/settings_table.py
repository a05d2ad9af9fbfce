"""Tables of the settings: names, defaults and forms from the program's schema, what they are from the docstrings of its
sections. The chart's table has those that are values, docs/settings.md all of them.

`python -m tests.helm.settings_table` writes the latter anew; a test fails when it is stale.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from policies._sections import Section
from policies.settings import Settings
from tests.helm.settings_schema import Schema, settings

Row = tuple[str, Any, Schema, str]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
MARK = "<!-- Made by `python -m tests.helm.settings_table`: change the docstrings in policies/ instead. -->"

ELSEWHERE = {
    "host": "the chart: every address of the pod",
    "port": "`proxy.port`",
    "redis_url": "`redis.existingSecret`, or the chart's own Valkey",
    "embedded_dir": "nothing: pods share one Redis",
    "keys": "variable `COUNTERSIGN_KEYS` in `existingSecret`, or `countersign keys create`",
    "models.NAME.reference.api_key": "a variable in `reference.existingSecret`",
    "models.NAME.second_reference.api_key": "a variable in `reference.existingSecret`",
    "backends.N.api_key": "variable `COUNTERSIGN_BACKENDS__N__API_KEY` in `proxy.existingSecret`",
    "audit.secret": "variable `COUNTERSIGN_AUDIT__SECRET` in `existingSecret`",
    "webhook.secret": "variable `COUNTERSIGN_WEBHOOK__SECRET` in `existingSecret`",
    "storage.encryption_keys": "variable `COUNTERSIGN_STORAGE__ENCRYPTION_KEYS` in `existingSecret`",
    "receipts.signing_keys": "variable `COUNTERSIGN_RECEIPTS__SIGNING_KEYS` in `existingSecret`",
    "admin.host": "`proxy.admin.enabled`",
    "admin.port": "`proxy.admin.port`",
    "admin.keys": "`proxy.admin.existingSecret`",
    "metrics.token": "`monitoring.credentials.existingSecret`",
    "metrics.host": "`monitoring.podMonitor.enabled`",
    "metrics.port": "`monitoring.podMonitor.port`",
}
"""Settings that are no values of the chart, being secrets or following from others, and what decides them there."""


def rows() -> Iterator[Row]:
    """Dotted name, default, schema and description of everything that may be set; `NAME` stands for a name of the
    operator's, `N` for a position in a list. A default of None is none."""
    tree, definitions = settings()
    yield from _below("settings", tree, definitions, _told("Settings"))


def every() -> Iterator[Row]:
    """The same of all settings there are, without `settings` in front."""
    tree = Settings.model_json_schema()
    for path, default, form, said in _below("", tree, tree.pop("$defs"), _told("Settings")):
        yield path.removeprefix("."), default, form, said


def elsewhere() -> Iterator[tuple[str, str]]:
    """Settings that are no values, lists as a whole, and what decides them; empty where nothing is known to."""
    values, told = {path.removeprefix("settings.") for path, *_ in rows()}, set()
    for path, *_ in every():
        name = next((name for name in ELSEWHERE if f"{path}.".startswith(f"{name}.")), path)
        if path not in values and name not in told:
            told.add(name)
            yield name, ELSEWHERE.get(name, "")


def page() -> str:
    """The whole page of settings, with the part by hand as it is."""
    from tests.helm import table

    by_hand = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    head = ["| setting | default | may be | what it is |", "|---|---|---|---|"]
    return "\n".join([by_hand + MARK, "", *head, *(table.line(*row) for row in every())]) + "\n"


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


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
