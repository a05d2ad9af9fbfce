from __future__ import annotations

import threading
import time

import pytest
from redis import Redis
from rq.job import Job

from policies import codec
from policies.settings import Settings
from policies.verification import unverified
from tests.verifier_pool import rig
from tests.verifier_pool.toy import ToyReference, answer, settings
from verifier_pool import worker
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import OPEN, VERIFY_QUEUE, evidence_key, waiting_key
from verifier_pool.loop import Loop
from verifier_pool.replays import REPLAYING, outcome_key, queue_of, replay_job, request_key
from verifier_pool.stages import jobs_of
from verifier_pool.standing import Standings
from verifier_pool.store import Store
from verifier_pool.sweeper import SWEEPING, sweep, sweep_in_turn

NOW = time.time()


@pytest.fixture
def store(redis: Redis) -> Store:
    return Store(redis, verdict_ttl=600)


def test_a_proxy_that_died(redis: Redis, store: Store) -> None:
    rules = settings("redis://x").verification
    rig.intent(redis, "a" * 32, NOW - 1)
    rig.intent(redis, "b" * 32, NOW + 100)
    assert sweep(store, rules, NOW) == 1
    verification = store.verdict("a" * 32)
    assert verification is not None
    assert (verification["verdict"], verification["reasons"]) == ("unverified", ["proxy_lost"])
    assert verification["backend"] == "honest"
    assert not store.decided("b" * 32)
    assert redis.zcard(OPEN) == 1
    # The backend was asked, so it counts that nothing is known of its answer.
    Standings(redis, settings("redis://x")).fold_left()
    (found,) = Standings(redis, settings("redis://x")).records("honest").values()
    assert found.declaration == rig.DECLARATION
    assert list(found.coverage.left) == ["proxy_lost"]


def test_a_job_that_waits_is_left_alone(redis: Redis, store: Store) -> None:
    rules = settings("redis://x")
    id = rig.submit(redis, rules, [answer()])
    redis.zadd(OPEN, {id: NOW - 1})
    assert sweep(store, rules.verification, NOW) == 0
    assert not store.decided(id)
    assert FairQueue(VERIFY_QUEUE, connection=redis).get_job_ids() == [id]
    assert redis.zscore(OPEN, id) == pytest.approx(NOW + rules.verification.lost_after)


def test_evidence_whose_job_was_lost_is_queued_again(redis: Redis, store: Store) -> None:
    rules = settings("redis://x")
    evidence = answer()
    rig.intent(redis, evidence.id, NOW - 1)
    redis.set(evidence_key(evidence.id), codec.pack([evidence]), ex=60)
    assert sweep(store, rules.verification, NOW) == 0
    assert FairQueue(VERIFY_QUEUE, connection=redis).get_job_ids() == [evidence.id]
    assert redis.zrange(waiting_key("honest"), 0, -1) == [evidence.id.encode()]
    rig.worker(redis, rules).serve(burst=True)
    assert rig.verdict_of(redis, evidence.id)["verdict"] == "unaudited"
    assert not redis.exists(waiting_key("honest"))


def test_evidence_that_expired_before_its_job_ran(redis: Redis, store: Store) -> None:
    rules = settings("redis://x")
    id = rig.submit(redis, rules, [answer()])
    queue = FairQueue(VERIFY_QUEUE, connection=redis)
    job = queue.fetch_job(id)
    assert job is not None
    job.cancel()
    redis.delete(evidence_key(id))
    redis.zadd(OPEN, {id: NOW - 1})
    assert sweep(store, rules.verification, NOW) == 1
    verification = store.verdict(id)
    assert verification is not None
    assert verification["reasons"] == ["evidence_expired"]


def audited(redis: Redis, url: str, **rules: int) -> tuple[Settings, str, rig.Pool]:
    """An answer that waits for its replay."""
    chosen = settings(url, verification=rules)
    id = rig.submit(redis, chosen, [answer()])
    pool = rig.worker(redis, chosen, {"toy": ToyReference()})
    pool.loop.serve(burst=True)
    assert redis.zscore(REPLAYING, replay_job(id)) is not None
    return chosen, id, pool


def test_a_replay_nobody_comes_to_is_judged_without(redis: Redis, store: Store, valkey_url: str) -> None:
    rules, id, pool = audited(redis, valkey_url, replay_wait=60)
    sweep(store, rules.verification, time.time() + 50)
    assert pool.loop.serve(burst=True) == 0
    sweep(store, rules.verification, time.time() + 70)
    assert not redis.exists(REPLAYING, request_key(id))
    pool.loop.serve(burst=True)
    verification = rig.verdict_of(redis, id)
    assert (verification["verdict"], verification["audited"]) == ("inconclusive", True)
    assert "reference_backlog" in verification["reasons"]
    # Its turn comes, and nothing is done.
    pool.serve(burst=True)
    assert not redis.exists(outcome_key(id))


def test_a_replay_that_runs_is_waited_for(redis: Redis, store: Store, valkey_url: str) -> None:
    rules, id, pool = audited(redis, valkey_url, replay_wait=60)
    redis.hset(Job.key_for(replay_job(id)), "status", "started")
    now = time.time() + 70
    sweep(store, rules.verification, now)
    assert redis.zscore(REPLAYING, replay_job(id)) == pytest.approx(now + 30, abs=5)
    redis.hset(Job.key_for(replay_job(id)), "status", "queued")
    pool.serve(burst=True)
    assert "reference_backlog" not in rig.verdict_of(redis, id)["reasons"]


def test_a_replay_that_failed_for_good_unheard(redis: Redis, store: Store, valkey_url: str) -> None:
    rules, id, pool = audited(redis, valkey_url)
    redis.hset(Job.key_for(replay_job(id)), "status", "failed")
    redis.zadd(REPLAYING, {replay_job(id): 1})
    sweep(store, rules.verification)
    pool.loop.serve(burst=True)
    assert "replay_failed" in rig.verdict_of(redis, id)["reasons"]
    assert redis.exists(Job.key_for(replay_job(id)))


def test_a_check_that_failed_for_good_unheard(redis: Redis, store: Store) -> None:
    rules = settings("redis://x").verification
    id = rig.submit(redis, settings("redis://x"), [answer()])
    redis.hset(Job.key_for(id), "status", "failed")
    redis.zadd(OPEN, {id: 1})
    assert sweep(store, rules) == 1
    assert rig.verdict_of(redis, id)["reasons"] == ["job_failed"]


@pytest.mark.parametrize("stage", ["asked", "replayed"])
def test_whatever_stage_is_lost_it_goes_on_from_there(redis: Redis, store: Store, valkey_url: str, stage: str) -> None:
    rules, id, pool = audited(redis, valkey_url)
    if stage == "replayed":
        pool.replaying[0].serve(burst=True)
    for queue in (VERIFY_QUEUE, queue_of("toy")):
        FairQueue(queue, connection=redis).empty()
    redis.delete(REPLAYING)
    redis.zadd(OPEN, {id: 1})
    assert sweep(store, rules.verification) == 0
    done = pool.serve(burst=True)
    assert done == (3 if stage == "asked" else 1)
    verification = rig.verdict_of(redis, id)
    assert verification["audited"] is True
    assert "reference_backlog" not in verification["reasons"]


def test_what_expired_while_it_waited_is_no_proxys_fault(redis: Redis, store: Store, valkey_url: str) -> None:
    rules, id, _ = audited(redis, valkey_url)
    redis.zadd(OPEN, {id: 1})
    assert sweep(store, rules.verification) == 0
    # Evidence and jobs are gone together.
    redis.delete(evidence_key(id), *(Job.key_for(job) for job in jobs_of(id)))
    redis.zadd(OPEN, {id: 1})
    assert sweep(store, rules.verification) == 1
    assert rig.verdict_of(redis, id)["reasons"] == ["evidence_expired"]


def test_a_job_that_runs_without_evidence_is_waited_for(redis: Redis, store: Store, valkey_url: str) -> None:
    rules, id, _ = audited(redis, valkey_url)
    redis.delete(evidence_key(id))
    redis.hset(Job.key_for(replay_job(id)), "status", "started")
    redis.zadd(OPEN, {id: 1})
    assert sweep(store, rules.verification) == 0
    redis.hset(Job.key_for(replay_job(id)), "status", "queued")
    redis.zadd(OPEN, {id: 1})
    assert sweep(store, rules.verification) == 1


def test_workers_sweep_in_turn(redis: Redis, store: Store) -> None:
    rules = settings("redis://x").verification
    rig.intent(redis, "a" * 32, NOW - 1)
    assert sweep_in_turn(store, rules) == 1
    rig.intent(redis, "b" * 32, NOW - 1)
    assert sweep_in_turn(store, rules) == 0
    assert 0 < redis.ttl(SWEEPING) <= 8


def test_a_verdict_is_never_overwritten(redis: Redis, store: Store) -> None:
    rules = settings("redis://x").verification
    store.settle(unverified("a" * 32, "backlog", None, 1.0), None)
    redis.zadd(OPEN, {"a" * 32: NOW - 1})
    assert sweep(store, rules, NOW) == 1
    verification = store.verdict("a" * 32)
    assert verification is not None
    assert verification["reasons"] == ["backlog"]
    assert redis.zcard(OPEN) == 0


def test_the_loop_sweeps_by_itself(redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "pulse", 0.1)
    rig.intent(redis, "a" * 32, NOW - 1)
    stop = threading.Event()
    rig.stop_when_decided(redis, "a" * 32, stop)
    worker.run(settings(valkey_url), stop)
    assert rig.verdict_of(redis, "a" * 32)["reasons"] == ["proxy_lost"]


@pytest.mark.parametrize("off", [-5000.0, 5000.0])
def test_a_worker_with_a_wrong_clock_ends_nothing_early_and_nothing_late(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch, off: float
) -> None:
    store = Store(redis, verdict_ttl=600)
    now = time.time()
    open_one, lost = "a" * 32, "b" * 32
    rig.intent(redis, open_one, now + 60)
    rig.intent(redis, lost, now - 60)
    monkeypatch.setattr(time, "time", lambda: now + off)
    assert sweep(store, settings(valkey_url).verification) == 1
    assert not store.decided(open_one)
    assert store.decided(lost)
