"""The import contracts name every module: a new one is decided about, not forgotten."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REACHED = {
    "connection",
    "durable",
    "events",
    "exposition",
    "fair",
    "fair_scripts",
    "fleet",
    "fleet_names",
    "keys",
    "letters",
    "limit_scripts",
    "meters",
    "orders",
    "otlp",
    "overlays",
    "processes",
    "queue",
    "receivers",
    "redis_url",
    "running",
    "scripts",
    "settings_file",
    "telemetry",
    "trail",
}
"""Modules of `verifier_pool` that the proxy may import: how workers are reached, and nothing that works."""


def test_the_proxy_may_import_only_how_workers_are_reached() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (forbidden,) = (set(each["forbidden_modules"]) for each in contracts if each["source_modules"] == ["proxy"])
    folder = ROOT / "verifier_pool"
    modules = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    expected = {f"verifier_pool.{name}" for name in modules - REACHED - {"__init__"}}
    assert {name for name in forbidden if name.startswith("verifier_pool.")} == expected
    assert {"benchmarks", "vllm", "torch"} <= forbidden
