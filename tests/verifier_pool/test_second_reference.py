"""What a second reference may do to a unit: confirm what accuses, or take it back, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from redis import Redis

from policies import unit
from policies.evidence import Evidence, Replay
from tests.verifier_pool import rig
from tests.verifier_pool.audits import Second, declared, judged, ready
from tests.verifier_pool.told import told
from tests.verifier_pool.toy import ToyReference, answer, failing
from verifier_pool.link.queue import (
    SECOND_UNCHECKED,
)
from verifier_pool.units import Confirmation, confirmed


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    rig.no_waits(monkeypatch)


def test_the_second_reference_confirms(redis: Redis, valkey_url: str) -> None:
    rules, second = declared(valkey_url), Second()
    pool = ready(redis, rules, ToyReference(), second)
    verification, found = judged(pool, redis, rules, answer((40, 41), 48, salt=1))
    assert found.outcomes["distance"][0] == 1.0
    assert "distance" in verification["second_reference"]["confirmed"]
    assert second.batches == [1]
    # Who is not accused is not replayed again.
    verification, _ = judged(pool, redis, rules, answer((40, 41), 48, kernels=99))
    assert "second_reference" not in verification
    assert second.batches == [1]


class Agreeable(Second):
    """Finds in every answer what its backend claims."""

    def __init__(self, evidence: Evidence) -> None:
        super().__init__()
        self.evidence = evidence

    def replay(self, requests: Any) -> list[Replay]:
        self.batches.append(len(requests))
        self.seen.extend(requests)
        return [Replay(self.evidence.claim_ids, self.evidence.claim_logprobs, "full", None, self.name)]


def test_the_second_reference_contradicts(redis: Redis, valkey_url: str) -> None:
    rules, evidence = declared(valkey_url), answer((40, 41), 48, salt=1)
    pool = ready(redis, rules, ToyReference(), Agreeable(evidence))
    verification, found = judged(pool, redis, rules, evidence)
    assert verification["verdict"] == "reject"
    assert "distance" in verification["second_reference"]["contradicted"]
    assert found.outcomes["distance"][0] == 0.0
    assert found.outcomes["distance"][1] > 0
    assert not redis.exists(SECOND_UNCHECKED)


@pytest.mark.parametrize("reason", ["unreachable", "too_long", "timeout"])
def test_a_second_reference_that_fails_makes_no_accusation(redis: Redis, valkey_url: str, reason: str) -> None:
    rules, second = declared(valkey_url), Second(failing(reason))
    pool = ready(redis, rules, ToyReference(), second)
    verification, found = judged(pool, redis, rules, answer((40, 41), 48, salt=1))
    assert verification["verdict"] == "reject"
    assert "distance" not in found.outcomes
    assert "distance" in verification["second_reference"]["unchecked"]
    assert set(found.outcomes) >= {"selection", "structure", "withheld"}
    assert len(second.batches) == (1 if reason == "too_long" else 4)
    assert redis.hgetall(SECOND_UNCHECKED) == {b"honest": b"1"}


def test_a_clients_own_seed_is_not_worth_a_second_replay(redis: Redis, valkey_url: str) -> None:
    rules, second = declared(valkey_url), Second()
    pool = ready(redis, rules, ToyReference(), second)
    evidence = answer((40, 41), 48, salt=1)
    evidence = replace(evidence, sampling=replace(evidence.sampling, client_seed=True))
    assert judged(pool, redis, rules, evidence)[1].outside == unit.CLIENT_SEED
    assert second.batches == []


def test_confirming_never_adds_evidence() -> None:
    rules = declared("redis://x")
    outcomes = {"distance": (1.0, 0.01), "margin": (0.0, 0.02), "routing": (1.0, 0.03), "selection": (1.0, 0.0)}
    first = told(rules, outcomes=outcomes | {"forged": (1.0, 0.0)})
    again = told(rules, outcomes={"distance": (1.0, 0.5), "margin": (1.0, 0.5), "forged": (0.0, 0.0)})
    after, found = confirmed(first, again)
    assert found == Confirmation(("distance",), ("forged",), ("routing",))
    assert after.outcomes == {
        "distance": (1.0, 0.01),
        "margin": (0.0, 0.02),
        "selection": (1.0, 0.0),
        "forged": (0.0, 0.0),
    }
    assert msgspec.structs.replace(after, outcomes={}) == msgspec.structs.replace(first, outcomes={})
