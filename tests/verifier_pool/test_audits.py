"""From a judged answer to its unit: who is audited, what extra replays may say, and what nobody could check."""

from __future__ import annotations

import secrets
import time
from typing import Any

import orjson
import pytest
from redis import Redis

from policies import audit
from policies.unit import declaration_name, declaration_of
from tests.verifier_pool import rig
from tests.verifier_pool.audits import declared, judged, lying, profile_of, rated, ready
from tests.verifier_pool.told import record
from tests.verifier_pool.toy import ToyReference, answer, failing
from verifier_pool import jobs
from verifier_pool.link.queue import (
    UNFOLDED,
    audited_key,
    intent_key,
    standing_key,
    units_key,
)
from verifier_pool.profiles import name_of
from verifier_pool.units import accusing


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    rig.no_waits(monkeypatch)


def test_an_audited_answer_tells_everything(redis: Redis, valkey_url: str) -> None:
    rules = declared(valkey_url)
    pool = ready(redis, rules, ToyReference())
    evidence = answer((40, 41), 48, kernels=99)
    verification, found = judged(pool, redis, rules, evidence)
    assert verification["verdict"] == "pass"
    assert set(found.outcomes) >= {"selection", "structure", "withheld", "distance", "margin"}
    assert (found.audited, found.replayed, found.tokens, found.outside) == (True, True, 48, "")
    assert found.declaration == declaration_of(rules.backend("honest"))
    assert found.profile == name_of(profile_of("toy 1")) != name_of(profile_of("toy 2"))
    assert found.delta == profile_of("toy 1").delta
    assert not accusing(found)


@pytest.mark.parametrize("operator", [True, False, None])
def test_the_operators_own_traffic_is_what_the_proxy_says(redis: Redis, valkey_url: str, operator: bool | None) -> None:
    rules = declared(valkey_url)
    pool = ready(redis, rules)
    assert judged(pool, redis, rules, answer(), operator)[1].operator is (operator is True)


def test_the_standing_says_how_many_are_audited(redis: Redis, valkey_url: str) -> None:
    rules, reference = declared(valkey_url), ToyReference()
    pool = ready(redis, rules, reference)
    rated(redis, rules, 0.25)
    ids = []
    for _ in range(80):
        evidence = answer((40, 41), 3)
        ids.append((evidence.id, judged(pool, redis, rules, evidence)[1].audited))
    assert ids == [(id, audit.chosen(b"secret", id, 0.25)) for id, _ in ids]
    assert 0 < sum(audited for _, audited in ids) < 50
    # A fixed rate of the settings outweighs it.
    fixed = declared(valkey_url, audit={"rate": 1.0})
    pool = ready(redis, fixed, reference)
    assert judged(pool, redis, fixed, answer((40, 41), 3))[1].audited


def test_a_second_pass_chooses_as_the_first_did(redis: Redis, valkey_url: str) -> None:
    rules = declared(valkey_url)
    reference = ToyReference(failing("unreachable", 1))
    pool = ready(redis, rules, reference)
    rated(redis, rules, 1.0)
    evidence = answer((40, 41), 48, kernels=99)
    rig.submit(redis, rules, [evidence])
    trouble = reference.trouble
    assert trouble is not None

    def falls(requests: Any) -> None:
        # By the time of the second pass the backend has earned a lower rate.
        rated(redis, rules, 0.0)
        trouble(requests)

    reference.trouble = falls
    pool.serve(burst=True)
    assert rig.verdict_of(redis, evidence.id)["audited"] is True
    assert 0 < redis.ttl(audited_key(evidence.id)) <= rules.verification.evidence_ttl


def test_an_answer_that_cpu_checks_reject_is_replayed_for_its_verdict_alone(redis: Redis, valkey_url: str) -> None:
    rules, reference = declared(valkey_url, audit={"rate": 0.0}), ToyReference()
    pool = ready(redis, rules, reference)
    verification, found = judged(pool, redis, rules, lying(answer((40, 41), 48)))
    assert verification["verdict"] == "reject"
    assert verification["extra_replay"] is True
    assert {check["name"] for check in verification["checks"]} >= {"distance", "margin"}
    assert reference.batches == [1]
    # What every answer is asked counts, and nothing of a replay that this one got for what it said.
    assert found.outcomes["selection"] == (1.0, 0.0)
    assert set(found.outcomes) == {"selection", "structure", "withheld"}
    assert (found.audited, found.replayed, found.outside) == (False, False, "")

    verification, _ = judged(pool, redis, rules, answer((40, 41), 48))
    assert (verification["verdict"], "extra_replay" in verification) == ("unaudited", False)
    assert reference.batches == [1]


def test_an_extra_replay_that_fails_costs_no_verdict(redis: Redis, valkey_url: str) -> None:
    rules = declared(valkey_url, audit={"rate": 0.0})
    pool = ready(redis, rules, ToyReference(failing("unreachable")))
    verification, found = judged(pool, redis, rules, lying(answer((40, 41), 48)))
    assert verification["verdict"] == "reject"
    assert "unreachable" in verification["reasons"]
    assert set(found.outcomes) == {"selection", "structure", "withheld"}


def test_a_secretly_chosen_answer_that_rejects_is_an_ordinary_audit(redis: Redis, valkey_url: str) -> None:
    rules, reference = declared(valkey_url), ToyReference()
    pool = ready(redis, rules, reference)
    verification, found = judged(pool, redis, rules, lying(answer((40, 41), 48)))
    assert "extra_replay" not in verification
    assert (found.audited, "distance" in found.outcomes) == (True, True)
    assert reference.batches == [1]


def test_a_standing_that_cannot_be_kept_costs_no_verdict(
    redis: Redis, valkey_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    rules = declared(valkey_url)
    name = declaration_name(declaration_of(rules.backend("honest")))
    redis.hset(standing_key("honest"), name, b"junk")
    ready(redis, rules)
    evidence = answer()
    rig.submit(redis, rules, [evidence])
    assert jobs.verify(evidence.id) == "unaudited"
    assert redis.llen(units_key("honest")) == 1
    assert "cannot be kept" in caplog.text


def test_what_nobody_checked_counts_against_the_coverage(redis: Redis, valkey_url: str) -> None:
    rules = declared(valkey_url)
    ready(redis, rules)
    id = secrets.token_hex(16)
    intent = {"id": id, "backend": "honest", "declaration": declaration_of(rules.backend("honest")), "owner": "o"}
    redis.set(intent_key(id), orjson.dumps(intent | {"created": time.time()}))
    assert jobs.verify(id) == "unverified"
    found = record(redis, rules).coverage
    assert (found.generations, found.decided, list(found.left)) == (1, 0, ["evidence_expired"])
    # Whose it was is not known: there is nobody to count it for.
    assert jobs.verify(secrets.token_hex(16)) == "unverified"
    assert not redis.exists(UNFOLDED)
