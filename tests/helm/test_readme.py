"""The chart's README: its table is whole and fresh, and what it says about commands, values and metrics is so."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml

from policies.settings import Settings
from tests.helm import schema, settings_table, table
from tests.helm.test_pool_page import known

TEXT = table.README.read_text(encoding="utf-8")
BY_HAND = TEXT.partition(table.MARK)[0]


def leaves(tree: dict[str, Any], path: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in tree.items():
        below = f"{path}{name}"
        if isinstance(value, dict) and value and below not in {"settings", "files"}:
            found |= leaves(value, f"{below}.")
        else:
            found.add(below)
    return found


def test_the_table_is_fresh() -> None:
    assert table.readme() == TEXT, "run python -m tests.helm.table"


def test_every_value_is_in_it_once() -> None:
    rows = [row for _, own in table.sections().values() for row in own]
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    values = yaml.safe_load(table.VALUES.read_text(encoding="utf-8"))
    for leaf in leaves(values):
        assert leaf in names or leaf.rpartition(".")[0] in names, leaf


def test_every_value_is_explained() -> None:
    for name, (about, rows) in table.sections().items():
        for row in rows:
            assert table.comment_of(row) or (row.name == name and about), row.name


def test_every_setting_is_in_it() -> None:
    for path, default, form, _ in settings_table.rows():
        assert f"| `{path}` |" in TEXT
        assert default is None or form.get("type") or "anyOf" in form or "enum" in form
    assert "| `settings.backends.N.url` |" in TEXT
    assert "api_key" not in {path.rpartition(".")[2] for path, *_ in settings_table.rows()}


def test_every_setting_is_explained_by_itself() -> None:
    """On the page of settings, which has those that are secret or the chart's as well."""
    page = settings_table.PAGE.read_text(encoding="utf-8")
    assert settings_table.page() == page, "run python -m tests.helm.schema"
    sections: dict[str, list[str]] = {}
    for path, _, _, said in settings_table.every():
        assert len(said) > 10, path
        assert page.partition(settings_table.MARK)[2].count(f"| `{path}` |") == 1
        sections.setdefault(path.rpartition(".")[0], []).append(said)
    for name, told in sections.items():
        assert len(set(told)) == len(told), name
    paths = {path for path, *_ in settings_table.every()}
    assert {"host", "redis_url", "keys.N.sha256", "admin.keys.N.name", "backends.N.api_key", "metrics.token"} <= paths
    assert set(Settings.model_fields) == {path.partition(".")[0] for path in paths}


def test_what_is_no_value_is_decided_by_something() -> None:
    found = dict(settings_table.elsewhere())
    assert all(found.values()), found
    assert set(found) == set(settings_table.ELSEWHERE)
    tree = schema.build()
    for why in found.values():
        for name in re.findall(r"`([a-z]+(?:\.[a-zA-Z]+)+)`", why):
            assert known(tree, name, tree["$defs"]), name


def test_every_value_of_the_schema_has_a_default() -> None:
    """What may be set and is not in values.yaml would be in no table."""
    values = yaml.safe_load(table.VALUES.read_text(encoding="utf-8"))

    def missing(form: dict[str, Any], tree: Any, path: str) -> list[str]:
        wrong = []
        for name, inner in form.get("properties", {}).items():
            if name not in tree:
                wrong.append(path + name)
            elif "properties" in inner and isinstance(tree[name], dict) and tree[name]:
                wrong += missing(inner, tree[name], f"{path}{name}.")
        return wrong

    whole = schema.build()
    del whole["properties"]["settings"]
    found = set(missing(whole, values | {"settings": {}}, ""))
    resources = {name for name in found if name.endswith(".resources.claims")}
    assert found - resources == {"global"}


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z]+(?:\.[a-zA-Z]+)+)`", BY_HAND))))
def test_values_that_are_named_exist(name: str) -> None:
    if name == "values.yaml":
        return
    tree = schema.build()
    assert known(tree, name, tree["$defs"]), name


def test_its_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", BY_HAND):
        assert (schema.CHART / link).exists(), link


def test_its_commands_name_what_is_there() -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", BY_HAND, re.DOTALL)
    lines = block.replace("\\\n", " ").splitlines()
    words = [shlex.split(line) for line in lines]
    assert [line[:2] for line in words] == [["kubectl", "create"], ["helm", "install"], ["helm", "test"]]
    install = words[1]
    assert (schema.CHART.parent / install[install.index("-f") + 1]).is_file()
    tree = schema.build()
    assert known(tree, install[install.index("--set") + 1].partition("=")[0], tree["$defs"])


def test_the_adapters_rule_makes_the_metric_that_is_asked_for() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", BY_HAND, re.DOTALL)
    (rule,) = yaml.safe_load(block)["rules"]["custom"]
    assert rule["name"] == {"as": "countersign_in_flight"}
    assert "countersign_in_flight" in (schema.CHART / "templates" / "horizontalpodautoscaler.yaml").read_text()
