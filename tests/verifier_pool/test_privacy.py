"""What is left of prompts and answers: sealed while it lies in Redis, and gone with the verdict where a key says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import orjson
import pytest
from redis import Redis

from policies.errors import OtherVersion
from policies.evidence import Evidence
from policies.settings import Settings, keeps
from policies.verification import unverified
from tests.verifier_pool import rig
from tests.verifier_pool.audits import lying
from tests.verifier_pool.toy import ToyReference, answer, settings
from verifier_pool import context, jobs
from verifier_pool.flights import NO_KEY, read_flights
from verifier_pool.link.queue import content_keys, evidence_key, intent_key
from verifier_pool.link.sealing import Sealer, is_sealed, new_key
from verifier_pool.parts import Parts
from verifier_pool.replays import outcome_key, replay_job, request_key
from verifier_pool.store import Store

KEY = new_key()


def left(redis: Redis, id: str) -> list[str]:
    """Keys that hold anything of the prompt or the answer."""
    cases = [key.decode() for key in cast("list[bytes]", redis.keys(f"*case:{id}*"))]
    return [key for key in (*content_keys(id), *cases) if redis.exists(key)]


def submitted(redis: Redis, rules: Settings, retain: str | None = None, evidence: Evidence | None = None) -> str:
    id = rig.submit(redis, rules, [evidence or answer()])
    if retain is not None:
        intent = orjson.loads(redis.get(intent_key(id)) or b"")
        redis.set(intent_key(id), orjson.dumps(intent | {"retain": retain}))
    return id


@pytest.mark.parametrize("retain", [None, "none", "rejects", "all", "junk", 5])
@pytest.mark.parametrize("word", ["pass", "reject", "unverified"])
def test_what_is_kept(retain: object, word: str) -> None:
    assert keeps(retain, word) == (retain != "none" and (retain != "rejects" or word == "reject"))


@pytest.mark.parametrize(("retain", "kept"), [(None, True), ("all", True), ("rejects", False), ("none", False)])
def test_an_answer_that_is_not_rejected(redis: Redis, valkey_url: str, retain: str | None, kept: bool) -> None:
    rules = settings(valkey_url)
    id = submitted(redis, rules, retain)
    rig.worker(redis, rules, {"toy": ToyReference()}).serve(burst=True)
    assert rig.verdict_of(redis, id)["verdict"] != "reject"
    assert bool(left(redis, id)) == kept
    assert all(0 < redis.ttl(key) <= 3600 for key in left(redis, id))


@pytest.mark.parametrize(("retain", "kept"), [("all", True), ("rejects", True), ("none", False)])
def test_an_answer_that_is_rejected(redis: Redis, valkey_url: str, retain: str, kept: bool) -> None:
    rules = settings(valkey_url)
    id = submitted(redis, rules, retain, lying(answer((40, 41), 48)))
    rig.worker(redis, rules).serve(burst=True)
    assert rig.verdict_of(redis, id)["verdict"] == "reject"
    assert bool(left(redis, id)) == kept


def test_evidence_that_comes_after_its_verdict_goes_too(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    id = submitted(redis, rules, "none")
    store = Store(redis, verdict_ttl=600)
    held = redis.get(evidence_key(id))
    rig.worker(redis, rules).serve(burst=True)
    assert store.decided(id)
    redis.set(evidence_key(id), cast(bytes, held))
    jobs.verify(id)
    assert left(redis, id) == []


@pytest.mark.parametrize(("retain", "kept"), [("none", False), ("rejects", False), ("all", True)])
@pytest.mark.parametrize("decided", [True, False])
def test_evidence_without_its_intent_is_kept_as_the_settings_say(
    redis: Redis, valkey_url: str, retain: str, kept: bool, decided: bool
) -> None:
    rules = settings(valkey_url, storage={"retain": retain})
    id = submitted(redis, rules)
    held = cast(bytes, redis.get(evidence_key(id)))
    rig.worker(redis, rules)
    if decided:
        _given_up(id)
        redis.set(evidence_key(id), held)
    redis.delete(intent_key(id))
    jobs.verify(id)
    assert rig.verdict_of(redis, id)["verdict"] != "reject"
    assert bool(left(redis, id)) == kept


@pytest.mark.parametrize("retain", ["all", "rejects", "none"])
def test_what_a_pass_kept_goes_where_another_verdict_came_first(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch, retain: str
) -> None:
    rules = settings(valkey_url)
    id = submitted(redis, rules, retain, lying(answer((40, 41), 48)))
    keep = Parts.case_of

    def after_it(self: Parts, *rest: Any, **more: Any) -> bytes:
        case = keep(self, *rest, **more)
        _given_up(id)
        return case

    rig.worker(redis, rules)
    monkeypatch.setattr(Parts, "case_of", after_it)
    jobs.verify(id)
    assert rig.verdict_of(redis, id)["reasons"] == ["job_failed"]
    assert cast("list[bytes]", redis.keys(f"*case:{id}*")) == []


def _given_up(id: str) -> None:
    store = context.current().store
    assert store.settle(unverified(id, "job_failed", store.intent(id), 1.0), None)


def test_what_two_passes_kept_alike_stays(redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = settings(valkey_url)
    id = submitted(redis, rules, "all", lying(answer((40, 41), 48)))
    keep, kept = Parts.case_of, list[bytes]()

    def twice(self: Parts, *rest: Any, **more: Any) -> bytes:
        case = keep(self, *rest, **more)
        kept.append(case)
        if len(kept) == 1:
            jobs.verify(id)
        return case

    rig.worker(redis, rules)
    monkeypatch.setattr(Parts, "case_of", twice)
    jobs.verify(id)
    assert kept[0] == kept[1]
    assert len(cast("list[bytes]", redis.keys(f"*case:{id}*"))) == 1


@pytest.fixture
def sealed(redis: Redis, valkey_url: str) -> Callable[[], tuple[Settings, str, rig.Pool]]:
    def make() -> tuple[Settings, str, rig.Pool]:
        rules = settings(valkey_url, storage={"encryption_keys": KEY})
        id = rig.submit(redis, rules, [answer()])
        return rules, id, rig.worker(redis, rules, {"toy": ToyReference()})

    return make


def test_everything_is_sealed_on_its_way(
    redis: Redis, valkey_url: str, sealed: Callable[[], tuple[Settings, str, rig.Pool]]
) -> None:
    rules, id, pool = sealed()
    pool.loop.serve(burst=True)
    request = cast(bytes, redis.get(request_key(id)))
    assert is_sealed(request)
    (flight,), _ = read_flights(redis, [replay_job(id)], Sealer())
    assert [str(each) for each in flight.outcomes] == [NO_KEY]
    pool.replaying[0].serve(burst=True)
    assert is_sealed(cast(bytes, redis.get(outcome_key(id))))
    pool.serve(burst=True)
    verification = rig.verdict_of(redis, id)
    assert verification["audited"]
    kept = left(redis, id)
    assert kept
    assert all(is_sealed(cast(bytes, redis.get(key))) for key in kept)
    plain = rig.submit(redis, settings(valkey_url), [answer()])
    rig.worker(redis, rules, {"toy": ToyReference()}).serve(burst=True)
    assert rig.verdict_of(redis, plain)["verdict"] == verification["verdict"]


def test_a_worker_without_the_key_leaves_it_to_one_that_has_it(
    redis: Redis, valkey_url: str, sealed: Callable[[], tuple[Settings, str, rig.Pool]]
) -> None:
    rules, id, _ = sealed()
    rig.worker(redis, settings(valkey_url))
    with pytest.raises(OtherVersion, match="encryption_keys"):
        jobs.verify(id)
    assert not context.current().store.decided(id)
    rig.worker(redis, rules).serve(burst=True)
    assert rig.verdict_of(redis, id)["reasons"] != ["evidence_unreadable"]


def test_what_was_changed_is_as_good_as_damaged(
    redis: Redis, sealed: Callable[[], tuple[Settings, str, rig.Pool]]
) -> None:
    _, id, pool = sealed()
    stored = bytearray(cast(bytes, redis.get(evidence_key(id))))
    stored[-1] ^= 1
    redis.set(evidence_key(id), bytes(stored))
    pool.serve(burst=True)
    assert rig.verdict_of(redis, id)["reasons"] == ["evidence_unreadable"]
