"""Settings of routing, health and breaker."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from policies.errors import SettingsError
from policies.settings import Settings, parse_settings

BASE: dict[str, Any] = {"models": {"m": {}}, "backends": [{"name": "b", "url": "http://b", "model": "m"}]}


def _parse(environ: dict[str, str] | None = None, **more: Any) -> Settings:
    return parse_settings(yaml.safe_dump(BASE | more), environ or {})


def test_defaults() -> None:
    settings = _parse()
    assert (settings.routing.policy, settings.routing.load_bound) == ("least_outstanding", 1.25)
    assert settings.models["m"].routing is None
    assert settings.health.interval > 0
    assert settings.breaker.longest > settings.breaker.open_seconds


def test_a_model_has_its_own() -> None:
    settings = _parse(models={"m": {"routing": {"policy": "prefix_hash", "sticky": []}}})
    assert settings.models["m"].routing is not None
    assert settings.models["m"].routing.sticky == ()
    assert settings.routing.policy == "least_outstanding"


def test_by_the_environment() -> None:
    environ = {
        "COUNTERSIGN_ROUTING__POLICY": "prefix_hash",
        "COUNTERSIGN_ROUTING__STICKY": "[user]",
        "COUNTERSIGN_HEALTH__INTERVAL": "0",
        "COUNTERSIGN_HEALTH__PATH": "/ping",
        "COUNTERSIGN_BREAKER__FAILURES": "9",
    }
    settings = _parse(environ)
    assert (settings.routing.policy, settings.routing.sticky) == ("prefix_hash", ("user",))
    assert (settings.health.interval, settings.health.path, settings.breaker.failures) == (0, "/ping", 9)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("routing", "policy", "random"),
        ("routing", "load_bound", 0.9),
        ("routing", "prefix_bytes", 0),
        ("routing", "queue", -1),
        ("routing", "queue_seconds", 0),
        ("health", "interval", -1),
        ("health", "path", "health"),
        ("health", "path", "/a b"),
        ("health", "timeout", 0),
        ("health", "down_after", 0),
        ("breaker", "failures", 0),
        ("breaker", "open_seconds", 0),
        ("breaker", "unknown", 1),
    ],
)
def test_what_makes_no_sense_is_named(section: str, key: str, value: Any) -> None:
    with pytest.raises(SettingsError) as raised:
        _parse(**{section: {key: value}})
    assert raised.value.key == f"{section}.{key}"


def test_a_breaker_that_shrinks() -> None:
    with pytest.raises(SettingsError, match="longest"):
        _parse(breaker={"open_seconds": 30, "longest": 10})
