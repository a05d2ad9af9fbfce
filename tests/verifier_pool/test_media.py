"""Answers to requests with media: decided without a replay, neither for nor against the backend."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from redis import Redis

from policies.errors import ReplayError
from tests.verifier_pool import rig
from tests.verifier_pool.audits import declared, judged, ready
from tests.verifier_pool.toy import ToyReference, answer
from verifier_pool.judge import for_each_choice
from verifier_pool.reference.rendering import prompt_fields

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
REQUEST = json.dumps({"model": "toy", "messages": [{"role": "user", "content": [IMAGE]}]}).encode()


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    rig.no_waits(monkeypatch)


def test_nothing_is_replayed_and_nothing_is_held_against_anybody(redis: Redis, valkey_url: str) -> None:
    rules, reference = declared(valkey_url), ToyReference()
    pool = ready(redis, rules, reference)
    text = answer((40, 41), 48, kernels=99)
    verification, unit = judged(pool, redis, rules, text)
    assert (verification["verdict"], unit.undecided) == ("pass", "")
    asked = len(reference.seen)
    image = dataclasses.replace(answer((40, 41), 48, kernels=99), request=REQUEST)
    verification, unit = judged(pool, redis, rules, image)
    assert verification["verdict"] == "inconclusive"
    assert {reason.partition(":")[0] for reason in verification["reasons"]} == {"media"}
    assert len(reference.seen) == asked
    assert (unit.undecided, unit.blame) == ("media", "request")
    assert not unit.outcomes.get("distance")


def test_each_choice_has_its_own_reason() -> None:
    choices = [dataclasses.replace(answer(), request=REQUEST), answer()]
    came: list[Any] = for_each_choice(choices, [ReplayError("timeout")])
    assert [error.reason for error in came] == ["media", "timeout"]


def test_the_prompt_is_not_rendered() -> None:
    assert prompt_fields(REQUEST, "toy") is None
