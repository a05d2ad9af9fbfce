"""One replay loop whose reference is down, dies, hangs or computes wrong numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
from redis import Redis
from rq.exceptions import AbandonedJobError
from rq.job import Job
from rq.serializers import JSONSerializer

from policies.errors import ReplayError
from policies.evidence import Evidence
from tests.support.waiting import PATIENCE
from tests.verifier_pool import rig
from tests.verifier_pool.flying import Running, Told, letters, submit
from tests.verifier_pool.toy import ToyReference, answer, settings
from verifier_pool import context, troubles
from verifier_pool.link.queue import evidence_key, verdict_key
from verifier_pool.loop import Loop
from verifier_pool.reference.canary import Canary, Known
from verifier_pool.replays import CANARIES, outcome_key, replay_job, request_key


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    rig.no_waits(monkeypatch)


def test_a_passing_trouble_is_tried_again_and_then_final(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    reference = ToyReference(lambda _: (_ for _ in ()).throw(ReplayError("unreachable")))
    id = rig.submit(redis, rules, [answer()])
    rig.worker(redis, rules, {"toy": reference}).serve(burst=True)
    assert "unreachable" in rig.verdict_of(redis, id)["reasons"]
    assert len(reference.batches) == 4
    assert letters(redis) == []


def test_a_reference_that_is_down_does_not_spend_every_jobs_tries(
    redis: Redis, valkey_url: str, running: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(troubles, "TROUBLE_SECONDS", (0.3,))
    asked: list[float] = []

    def trouble(_: object) -> None:
        asked.append(time.monotonic())
        if len(asked) <= 5:
            raise ReplayError("unreachable")

    ids = submit(redis, valkey_url, 40)
    running(ToyReference(trouble), max_in_flight=2)
    verdicts = [rig.verdict_of(redis, id) for id in ids]
    assert sum("unreachable" in verdict["reasons"] for verdict in verdicts) <= 3
    # Two at once, and then one after each wait.
    assert asked[4] - asked[0] > 0.3 * 2


def fell(redis: Redis, ids: Sequence[str]) -> None:
    """As if a process had died while these were in flight."""
    for id in ids:
        redis.hset(Job.key_for(replay_job(id)), "retries_left", 2)


def test_what_was_in_flight_at_a_crash_runs_alone(
    redis: Redis, valkey_url: str, told: Told, running: Callable[..., Running]
) -> None:
    ids = submit(redis, valkey_url, 8)
    pool = rig.worker(redis, settings(valkey_url), {"toy": told})
    pool.loop.serve(burst=True)
    fell(redis, ids[2:4])
    running(told)
    # Those that nothing is known of fly together; the suspects one by one.
    for flying in (6, 1, 1):
        rig.wait_until(lambda count=flying: len(told.held) == count)  # type: ignore[misc]
        time.sleep(0.1)
        assert len(told.held) == flying
        told.let()
    for id in ids:
        assert rig.verdict_of(redis, id)["audited"] is True


def test_evidence_that_kills_its_engine_ends_among_the_dead_letters_alone(
    redis: Redis, valkey_url: str, running: Callable[..., Running]
) -> None:
    rules = settings(valkey_url)
    innocents = submit(redis, valkey_url, 30)
    poison = rig.submit(redis, rules, [answer((9, 9, 9, 9))])
    told = Told()
    running(told)
    deaths = 0
    rig.wait_until(lambda: len(told.held) == 31)
    deadline = time.monotonic() + PATIENCE
    while not letters(redis):
        assert time.monotonic() < deadline
        with told._lock:
            bad = any(len(request.prompt_ids) == 4 for request, _ in told.held)
        if bad:
            deaths += 1
            assert deaths == 1 or len(told.held) == 1
            told.failing = lambda _: "engine_failed"
        told.let()
        told.failing = lambda _: None
        time.sleep(0.005)
    told.let()
    assert deaths == 4
    assert letters(redis) == [replay_job(poison)]
    while not all(context.current().store.decided(id) for id in innocents):
        told.let()
        time.sleep(0.01)
    for id in innocents:
        assert "replay_failed" not in str(rig.verdict_of(redis, id)["reasons"])
    verdict = rig.verdict_of(redis, poison)
    assert (verdict["verdict"], verdict["audited"]) == ("inconclusive", True)
    assert "replay_failed: engine_failed" in verdict["reasons"]
    assert [check["result"] for check in verdict["checks"]][:2] == ["pass", "pass"]


def test_a_bug_in_a_reference_is_told_by_its_type_alone(redis: Redis, valkey_url: str) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("the prompt was SECRET")

    id = rig.submit(redis, settings(valkey_url), [answer()])
    rig.worker(redis, settings(valkey_url), {"toy": ToyReference(broken)}).serve(burst=True)
    assert "replay_failed: ZeroDivisionError" in rig.verdict_of(redis, id)["reasons"]
    assert letters(redis) == [replay_job(id)]
    result = Job.fetch(replay_job(id), connection=redis, serializer=JSONSerializer).latest_result()
    assert result is not None
    assert result.exc_string == "ZeroDivisionError"


def test_a_damaged_request_costs_the_replay_only(redis: Redis, valkey_url: str) -> None:
    (id,) = submit(redis, valkey_url, 1)
    pool = rig.worker(redis, settings(valkey_url), {"toy": ToyReference()})
    pool.loop.serve(burst=True)
    redis.set(request_key(id), b"junk")
    pool.serve(burst=True)
    verdict = rig.verdict_of(redis, id)
    assert (verdict["verdict"], verdict["audited"]) == ("inconclusive", True)
    assert "bad_replay" in str(verdict["reasons"])


def test_what_is_over_its_time_is_taken_out_and_a_reference_that_hangs_is_started_again(
    redis: Redis, valkey_url: str, told: Told, running: Callable[..., Running]
) -> None:
    rules = settings(valkey_url, verification={"job_timeout": 2})
    id = rig.submit(redis, rules, [answer()])
    running(told, rules)
    rig.wait_until(lambda: told.restarts == 1)
    assert told.held[0][1].cancelled()
    rig.wait_until(lambda: (told.let(), context.current().store.decided(id))[1])
    assert rig.verdict_of(redis, id)["audited"] is True


def test_heartbeats_keep_what_is_in_flight_from_being_taken_twice(
    redis: Redis, valkey_url: str, told: Told, running: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "patience", 5)
    monkeypatch.setattr(Loop, "pulse", 0.2)
    ids = submit(redis, valkey_url, 20)
    first = running(told)
    rig.wait_until(lambda: len(told.held) == 20)
    other = rig.worker(redis, settings(valkey_url), {"toy": ToyReference()})
    deadline = time.monotonic() + 8
    while time.monotonic() < deadline:
        other.replaying[0].run_maintenance_tasks()  # type: ignore[no-untyped-call]
        assert other.replaying[0].serve(burst=True) == 0
        time.sleep(0.2)
    told.let()
    for id in ids:
        rig.verdict_of(redis, id)
    assert len(told.seen) == 20
    first.end()


def canary_of(good: Evidence, seconds: float) -> Canary:
    canary = Canary(seconds)
    canary.learn([Known(good.prompt_ids, good.output_ids, good.claim_ids, good.claim_logprobs)])
    return canary


def test_canaries_are_mixed_in_and_counted(redis: Redis, valkey_url: str) -> None:
    reference = ToyReference()
    reference.canary = canary_of(answer((1, 2, 3)), 1e-9)
    ids = submit(redis, valkey_url, 3)
    rig.worker(redis, settings(valkey_url), {"toy": reference}, max_in_flight=1).serve(burst=True)
    for id in ids:
        rig.verdict_of(redis, id)
    # Each of the three brings a canary with it, which asks for both forms.
    assert len(reference.seen) == 3 + 3 * 2
    assert redis.hgetall(CANARIES) == {b"toy:passed": b"3"}


def test_a_reference_whose_canary_is_wrong_is_started_again_and_its_replays_repeated(
    redis: Redis, valkey_url: str, told: Told, running: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    ids = submit(redis, valkey_url, 20)
    told.canary = canary_of(answer((1, 2, 3), salt=1), 3600)  # another model's answer
    running(told)
    rig.wait_until(lambda: len(told.held) == 22)
    told.held.sort(key=lambda held: -int(held[0].prompt_ids[0]))
    told.let(10)
    rig.wait_until(lambda: sum(redis.exists(outcome_key(id)) or redis.exists(verdict_key(id)) for id in ids) == 10)
    told.held.reverse()
    told.let(2)
    rig.wait_until(lambda: told.restarts == 1)
    told.canary = None
    told.held = [held for held in told.held if not held[1].cancelled()]
    repeated = 0
    while not all(context.current().store.decided(id) for id in ids):
        repeated += told.let()
        time.sleep(0.01)
    # The ten that had landed before it spoke are what they are.
    assert repeated == 10
    assert redis.hgetall(CANARIES) == {b"toy:failed": b"1", b"toy:restarts": b"1"}
    assert "wrong numbers" in caplog.text
    assert letters(redis) == []


def test_a_worker_that_is_told_to_stop_lands_what_flies(
    redis: Redis, valkey_url: str, told: Told, running: Callable[..., Running]
) -> None:
    ids = submit(redis, valkey_url, 100)
    first = running(told, max_in_flight=80)
    rig.wait_until(lambda: len(told.held) == 80)
    first.stop.set()
    time.sleep(0.3)
    assert first.thread.is_alive()
    told.let()
    first.end()
    assert not told.held
    rig.worker(redis, settings(valkey_url), {"toy": ToyReference()}).serve(burst=True)
    for id in ids:
        rig.verdict_of(redis, id)
    assert len(told.seen) == 80


def test_an_abandoned_replay_that_is_out_of_tries_is_given_up(redis: Redis, valkey_url: str) -> None:
    (id,) = submit(redis, valkey_url, 1)
    pool = rig.worker(redis, settings(valkey_url), {"toy": ToyReference()})
    pool.loop.serve(burst=True)
    pool.replaying[0]._on_exception(Job.fetch(replay_job(id), redis), AbandonedJobError, AbandonedJobError(), None)
    redis.hset(Job.key_for(replay_job(id)), "retries_left", 0)
    pool.replaying[0]._on_exception(Job.fetch(replay_job(id), redis), AbandonedJobError, AbandonedJobError(), None)
    pool.loop.serve(burst=True)
    assert "replay_failed: AbandonedJobError" in rig.verdict_of(redis, id)["reasons"]
    assert redis.exists(evidence_key(id))
