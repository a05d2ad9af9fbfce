"""The operating part of docs/pool.md: its settings, values, commands, URLs and names exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

import countersign
from policies.settings import Settings, parse_settings
from proxy.metrics import Metrics
from tests.helm import schema
from tests.helm.rendered import Release, container
from verifier_pool import queue_command, ready, worker

WHOLE = (Path(__file__).parents[2] / "docs" / "pool.md").read_text()
PAGE = WHOLE.partition("\n## Operating\n")[2]
NAMED = re.findall(r"`([^`\n]+)`", PAGE)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def known(tree: dict[str, Any], path: str, definitions: dict[str, Any]) -> bool:
    """Whether a JSON schema has a property at a dotted path."""
    for name in path.split("."):
        while "$ref" in tree or "anyOf" in tree:
            tree = tree["anyOf"][0] if "anyOf" in tree else definitions[tree["$ref"].rpartition("/")[2]]
        tree = tree.get("properties", {}).get(name)
        if tree is None:
            return False
    return True


def test_settings_and_values_exist(chart: helm.Chart) -> None:
    (values,) = [yaml.safe_load(block) for block in blocks("yaml")]
    release = Release(chart, values)
    assert release.settings().models["small"].reference is not None
    processes = {name: container(pod)["command"] for name, pod in release.pods().items()}
    assert [command[-1] for name, command in processes.items() if "reference" in name] == ["large", "small"]
    elsewhere = re.findall(r"```yaml\n(.*?)```", WHOLE.partition("\n## Operating\n")[0], re.DOTALL)
    assert [parse_settings(block, {}).durability.aof for block in elsewhere] == [True]


def test_named_settings_exist() -> None:
    settings, values = Settings.model_json_schema(), schema.build()
    paths = {name for name in NAMED if re.fullmatch(r"[a-z_]+(\.[a-zA-Z_]+)+", name)} - {"countersign.yaml"}
    modules = {name for name in paths if name.startswith("verifier_pool.")}
    assert len(paths) > 8
    for name in paths - modules:
        assert known(settings, name, settings["$defs"]) or known(values, name, values["$defs"]), name
    for name in ("redis_url", "allInOne"):
        assert name in NAMED or f"{name}: true" in NAMED
        assert known(settings, name, {}) or known(values, name, {})


PARSERS = {"worker": worker._parser(), "queue": queue_command._parser()}


@pytest.mark.parametrize("line", [line for block in blocks("sh") for line in block.splitlines()])
def test_commands_are_understood(line: str) -> None:
    words = [word for word in shlex.split(line, comments=True) if "=" not in word]
    assert words[0] == "countersign"
    assert words[1] in countersign.COMMANDS
    if words[1] in PARSERS:
        PARSERS[words[1]].parse_args(words[2:])


def test_the_probe_takes_the_words_that_are_named() -> None:
    options = {option for action in ready._parser()._actions for option in action.option_strings}
    assert {"--only", "--model", "--reference", "--alive"} <= options
    assert "python -m verifier_pool.ready" in NAMED


def test_metrics_exist() -> None:
    metrics = Metrics()
    metrics.unrecorded.add(1, {"reason": "backlog", "backend": "b"})
    metrics.waits({"b": 1}, {"b": 1})
    page = metrics.page(private=True).decode()
    metrics.close()
    names = set(re.findall(r"`(countersign_\w+)", WHOLE))
    assert len(names) == 3
    for name in names:
        assert re.search(rf"^{name}{{", page, re.MULTILINE), name
