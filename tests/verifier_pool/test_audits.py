"""From a judged answer to its unit: who is audited, what extra replays and second references may say, and what a worker
that dies leaves behind."""

from __future__ import annotations

import random
import secrets
import threading
import time
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import orjson
import pytest
from redis import Redis

from policies import audit, distance, margin, unit
from policies.evidence import Evidence, Replay
from policies.profile import Profile, ProfileKey, fit
from policies.settings import Settings
from policies.unit import Unit, declaration_name, declaration_of
from policies.verification import Verification
from tests.verifier_pool import rig
from tests.verifier_pool.crashes import survives, together
from tests.verifier_pool.told import events, outbox, push, record, told
from tests.verifier_pool.toy import ToyReference, answer, failing, settings
from verifier_pool import context, fair, jobs, queue, replay_loop, rq_job, worker
from verifier_pool.judge import replay_choices
from verifier_pool.loop import Loop
from verifier_pool.profiles import name_of
from verifier_pool.queue import (
    OPEN,
    OUTBOX,
    SECOND_UNCHECKED,
    STANDINGS,
    UNFOLDED,
    audited_key,
    intent_key,
    standing_key,
    units_key,
    verdict_key,
)
from verifier_pool.reference.base import Reference
from verifier_pool.replays import REPLAYING, outcome_key, request_key
from verifier_pool.standing import Standings
from verifier_pool.store import Store
from verifier_pool.sweeper import sweep
from verifier_pool.units import Confirmation, accusing, confirmed

RUNTIME = "vllm-0.32-v1-cpu"
WEBHOOK = {"url": "https://example.com/hook", "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair, "RETRY_SECONDS", (0, 0, 0))
    monkeypatch.setattr(queue, "RETRY_SECONDS", (0, 0, 0))
    monkeypatch.setattr(replay_loop, "RETRY_SECONDS", (0, 0, 0))
    monkeypatch.setattr(replay_loop, "TROUBLE_SECONDS", (0.0,))


class Second(ToyReference):
    name = "toy 2"


@cache
def profile_of(name: str) -> Profile:
    """What honest toys with other kernels look like to the reference of that name."""
    reference = ToyReference()
    reference.name = name
    measured = []
    for seed in range(24):
        evidence = answer((seed, seed + 1), 48, kernels=seed + 1)
        (replay,) = replay_choices([evidence], reference, last_try=True)
        assert isinstance(replay, Replay)
        for each in (distance, margin):
            measured += each.calibration_rows(evidence, replay)
    return fit(measured, ProfileKey(model="toy", runtime=RUNTIME, precision="", reference=name))


def declared(url: str, **changes: object) -> Settings:
    backend = {"name": "honest", "url": "http://127.0.0.1:1", "model": "toy", "runtime": RUNTIME}
    return settings(url, backends=[backend], **changes)


def ready(redis: Redis, rules: Settings, first: Reference | None = None, second: Reference | None = None) -> rig.Pool:
    """A worker with its context in place, which knows both profiles."""
    declared = rig.declaring(rules, first=first is not None, second=second is not None)
    store = Store(redis, verdict_ttl=600, webhook=rules.webhook is not None)
    profiles, second_profiles = {"toy": profile_of("toy 1")}, {"toy": profile_of("toy 2")}
    context.use(context.Context(declared, store, profiles, b"secret", second_profiles))
    return rig.Pool(redis, declared, first, second)


def judged(
    pool: rig.Pool, redis: Redis, rules: Settings, evidence: Evidence, operator: bool | None = None
) -> tuple[Verification, Unit]:
    """The verification and the unit of an answer, which no fold has taken."""
    rig.submit(redis, rules, [evidence])
    if operator is not None:
        intent = orjson.loads(redis.get(intent_key(evidence.id)) or b"")
        redis.set(intent_key(evidence.id), orjson.dumps(intent | {"operator": operator}))
    redis.delete(units_key("honest"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "_fold", lambda *_: None)
        pool.serve(burst=True)
    verification = context.current().store.verdict(evidence.id)
    assert verification is not None
    (data,) = redis.lrange(units_key("honest"), 0, -1)
    return verification, msgspec.json.decode(data, type=Unit)


def rated(redis: Redis, rules: Settings, rate: float) -> None:
    """Give the backend a standing with this audit rate."""
    name = declaration_name(declaration_of(rules.backend("honest")))
    redis.hset(STANDINGS, f"honest:{name}", orjson.dumps({"state": "trusted", "audit_rate": rate}))


def lying(evidence: Evidence) -> Evidence:
    """An answer whose greedy token is not its claim's most probable: selection rejects it."""
    output = evidence.output_ids.copy()
    claim = evidence.claim_ids.copy()
    row = 5
    claim[row, [0, 4]] = claim[row, [4, 0]]
    logprobs = evidence.claim_logprobs.copy()
    logprobs[row, [0, 4]] = logprobs[row, [4, 0]]
    output[row] = claim[row, 0]
    return replace(evidence, output_ids=output, claim_ids=claim, claim_logprobs=logprobs)


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


def test_a_worker_killed_at_any_command_leaves_one_verdict_and_one_unit(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a dead worker held is found at once.
    monkeypatch.setattr(Loop, "patience", 0)
    monkeypatch.setattr(rq_job, "STRANDED_SECONDS", -1)
    rules = declared(valkey_url, webhook=WEBHOOK)
    evidence = answer((40, 41), 48, salt=1)

    def work() -> None:
        ready(Redis.from_url(valkey_url), rules, ToyReference(), Second()).serve(burst=True)

    # At every command takes a minute; in time, each of them has its turn.
    command, ended, before = random.randrange(6), False, set[str]()
    while not ended:
        redis.flushall()
        # An older declaration, so that the first unit of this one brings an event with it.
        push(redis, told(settings(valkey_url)))
        Standings(redis, rules).fold("honest")
        rig.submit(redis, rules, [evidence])
        ended = survives(work, command)
        # Another worker finds what is left.
        before.add(where(redis, evidence.id))
        pool = ready(redis, rules, ToyReference(), Second())
        for _ in range(3):
            for each in (pool.loop, *pool.replaying):
                each.run_maintenance_tasks()  # type: ignore[no-untyped-call]
            pool.serve(burst=True)
        if not context.current().store.decided(evidence.id):
            redis.zadd(OPEN, {evidence.id: 1})
            sweep(context.current().store, rules.verification)
            pool.serve(burst=True)
        context.current().standings.fold_left(60)
        verification = context.current().store.verdict(evidence.id)
        assert verification is not None, command
        assert verification["verdict"] == "reject"
        assert "distance" in verification["second_reference"]["confirmed"]
        found = record(redis, rules)
        assert (found.coverage.generations, found.n) == (1, 1)
        assert [entry.id for entry in found.accusing] == [evidence.id]
        assert outbox(redis).count(evidence.id) == 1
        assert [event["type"] for event in events(redis)] == ["backend.redeclared"]
        assert not redis.exists(units_key("honest"), UNFOLDED, REPLAYING)
        command += 6
    assert before >= {"recorded", "asked", "replayed", "asked again", "replayed again", "decided"}


def where(redis: Redis, id: str) -> str:
    """How far a response has come."""
    keys = [
        verdict_key(id),
        outcome_key(id, second=True),
        request_key(id, second=True),
        outcome_key(id),
        request_key(id),
    ]
    words = ["decided", "replayed again", "asked again", "replayed", "asked"]
    return next((word for key, word in zip(keys, words, strict=True) if redis.exists(key)), "recorded")


def test_a_job_in_two_processes_at_once_is_one_verdict_and_one_unit(redis: Redis, valkey_url: str) -> None:
    rules = declared(valkey_url, webhook=WEBHOOK)
    answers = [answer((40, number % 60), 20, kernels=number) for number in range(60)]
    for evidence in answers:
        rig.submit(redis, rules, [evidence])

    def work() -> None:
        pool = ready(Redis.from_url(valkey_url), rules, ToyReference())
        for evidence in answers:
            jobs.verify(evidence.id)
        pool.serve(burst=True)

    together(work, work)
    ready(redis, rules, ToyReference()).serve(burst=True)
    Standings(redis, rules).fold_left(60)
    assert record(redis, rules).coverage.generations == 60
    assert redis.zcard(OUTBOX) == 60
    assert not redis.exists(units_key("honest"), UNFOLDED)


def test_the_timer_of_a_worker_finds_what_a_dead_one_left(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "pulse", 0.05)
    rules = declared(valkey_url)
    push(redis, *(told(rules) for _ in range(3)))
    stop = threading.Event()

    def watch() -> None:
        rig.wait_until(lambda: not redis.exists(UNFOLDED))
        stop.set()

    threading.Thread(target=watch, daemon=True).start()
    worker.run(rules, stop)
    assert record(redis, rules).coverage.generations == 3


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
