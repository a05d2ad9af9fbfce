from __future__ import annotations

import threading
import time

import pytest
from redis import Redis

from policies import codec
from policies.verification import unverified
from tests.verifier_pool import rig
from tests.verifier_pool.toy import answer, settings
from verifier_pool import worker
from verifier_pool.fair import FairQueue
from verifier_pool.loop import Loop
from verifier_pool.queue import OPEN, VERIFY_QUEUE, evidence_key, waiting_key
from verifier_pool.standing import Standings
from verifier_pool.store import Store
from verifier_pool.sweeper import sweep

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
