"""What a declaration leaves out is said by the key's name."""

from __future__ import annotations

from typing import Any

from policies.settings import Settings
from policies.undeclared import undeclared

WHOLE: dict[str, Any] = {
    "tokenizer": "/models/m",
    "vocab_size": 1000,
    "max_model_len": 4096,
    "eos_token_ids": [2],
}


def _missing(*, trusted: bool = False, **model: Any) -> list[str]:
    backends = [{"name": "b", "url": "http://b:1", "model": "m", "trusted": trusted}]
    settings = Settings.model_validate({"models": {"m": model, "unused": {}}, "backends": backends})
    return [each.setting for each in undeclared(settings)]


def test_nothing_is_missing() -> None:
    assert _missing(**WHOLE) == []


def test_each_is_named() -> None:
    assert _missing() == [f"models.m.{key}" for key in WHOLE]
    for key in WHOLE:
        assert _missing(**{name: value for name, value in WHOLE.items() if name != key}) == [f"models.m.{key}"]


def test_whoever_is_trusted_may() -> None:
    assert _missing(trusted=True) == []
