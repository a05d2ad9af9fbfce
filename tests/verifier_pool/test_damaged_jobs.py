"""A record of a job that somebody damaged fails by itself, and takes neither its process nor anything else down."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
from redis import Redis
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from policies.verification import Verification
from tests.verifier_pool import rig
from tests.verifier_pool.toy import ToyReference, answer, settings
from verifier_pool import rq_job
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.letters import find
from verifier_pool.link.queue import OPEN, VERIFY_QUEUE
from verifier_pool.loop import Loop
from verifier_pool.replays import queue_of, replay_job
from verifier_pool.rq_job import OurJob
from verifier_pool.stages import Stages
from verifier_pool.store import Store
from verifier_pool.sweeper import sweep

FIELDS = ["data", "origin", "status", "timeout", "ttl", "result_ttl", "failure_ttl", "meta", "retries_left"]
FIELDS += ["retry_intervals", "number_of_retries", "created_at", "enqueued_at", "worker_name", "description"]
RUBBISH = [b"\xff\xfe", b"[1,2]", b"-1", b"x", b'{"lane":"x","tenant":{"a":1},"tokens":"many","size":"9"}']
RUBBISH += [
    b'{"lane":4,"tenant":"o","tokens":1e400,"size":-1,"backend":["x"]}',
    b'{"lane":true,"tokens":1' + b"0" * 400,
]


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    rig.no_waits(monkeypatch)


def end_of(redis: Redis, pool: rig.Pool, id: str) -> Verification:
    """The verdict, which the sweeper may have to see to."""
    store = Store(redis, verdict_ttl=600)
    redis.zadd(OPEN, {id: time.time()}, xx=True)
    for later in (0, 10_000):
        if not store.decided(id):
            sweep(store, settings("redis://x").verification, now=time.time() + later)
            pool.serve(burst=True)
    return rig.verdict_of(redis, id)


@pytest.mark.parametrize("field", FIELDS)
def test_a_replay_job(redis: Redis, valkey_url: str, field: str) -> None:
    rules = settings(valkey_url)
    pool = rig.worker(redis, rules, {"toy": ToyReference()})
    ids = [rig.submit(redis, rules, [answer()]) for _ in range(2 * len(RUBBISH))]
    pool.loop.serve(burst=True)
    for id, value in zip(ids[::2], RUBBISH, strict=True):
        redis.hset(Job.key_for(replay_job(id)), field, value)
    pool.serve(burst=True)
    for id in ids[1::2]:
        assert rig.verdict_of(redis, id)["audited"] is True
    for id in ids[::2]:
        assert end_of(redis, pool, id)["verdict"] in ("pass", "inconclusive", "unverified")


@pytest.mark.parametrize("field", FIELDS)
def test_a_cpu_job(redis: Redis, valkey_url: str, field: str) -> None:
    rules = settings(valkey_url)
    pool = rig.worker(redis, rules)
    ids = [rig.submit(redis, rules, [answer()]) for _ in range(2 * len(RUBBISH))]
    for id, value in zip(ids[::2], RUBBISH, strict=True):
        redis.hset(Job.key_for(id), field, value)
    pool.serve(burst=True)
    for id in ids[1::2]:
        assert rig.verdict_of(redis, id)["verdict"] == "unaudited"
    for id in ids[::2]:
        assert end_of(redis, pool, id)["verdict"] in ("unaudited", "unverified")


@pytest.mark.parametrize("field", FIELDS)
def test_a_job_whose_retry_is_due(redis: Redis, valkey_url: str, field: str) -> None:
    rules = settings(valkey_url)
    pool = rig.worker(redis, rules)
    ids = [rig.submit(redis, rules, [answer()]) for _ in range(2 * len(RUBBISH))]
    waiting: Any = FairQueue(VERIFY_QUEUE, connection=redis)
    for id in ids:
        waiting.remove(id)
        redis.zadd(waiting.scheduled_job_registry.key, {id: 1})
        redis.hset(Job.key_for(id), "status", JobStatus.SCHEDULED.value)
    for id, value in zip(ids[::2], RUBBISH, strict=True):
        redis.hset(Job.key_for(id), field, value)
    pool.loop._release_due()
    pool.serve(burst=True)
    for id in ids[1::2]:
        assert rig.verdict_of(redis, id)["verdict"] == "unaudited"
    for id in ids[::2]:
        assert end_of(redis, pool, id)["verdict"] in ("unaudited", "unverified")


def abandoned(redis: Redis, loop: Loop, *, begun: bool) -> None:
    """All that waits in the queue was taken by a process that died, after it began or before."""
    (ours,) = loop.queues
    ids = ours.take(1000)  # type: ignore[attr-defined]
    for id in ids if begun else ():
        with redis.pipeline() as pipeline:
            loop._begin(OurJob.fetch(id, connection=redis, serializer=JSONSerializer), pipeline)
            pipeline.execute()
    for entry in cast("list[bytes]", redis.zrange(ours.started_job_registry.key, 0, -1)):
        redis.zadd(ours.started_job_registry.key, {entry: 1})


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("field", [*FIELDS, "all"])
def test_a_job_whose_process_died(
    redis: Redis, valkey_url: str, field: str, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rq_job, "STRANDED_SECONDS", -1)
    rules = settings(valkey_url)
    pool = rig.worker(redis, rules)
    ids = [rig.submit(redis, rules, [answer()]) for _ in range(2 * len(RUBBISH))]
    abandoned(redis, pool.loop, begun=begun)
    for id, value in zip(ids[::2], RUBBISH, strict=True):
        if field == "all":
            redis.set(Job.key_for(id), value)
        else:
            redis.hset(Job.key_for(id), field, value)
    for _ in range(3):
        pool = rig.worker(redis, rules)
        pool.serve(burst=True)  # keeps up first
        (ours,) = pool.loop.queues
        for later in cast("list[bytes]", redis.zrange(ours.scheduled_job_registry.key, 0, -1)):
            redis.zadd(ours.scheduled_job_registry.key, {later: 1})
    for id in ids[1::2]:
        assert rig.verdict_of(redis, id)["verdict"] == "unaudited"
    unreadable = 0
    for id in ids[::2]:
        verdict = end_of(redis, pool, id)
        assert verdict["verdict"] in ("unaudited", "unverified")
        unreadable += verdict["reasons"] == ["job_unreadable"]
    assert field != "all" or unreadable == len(RUBBISH)
    letters = {letter.id: letter.reason for letter in find(redis)}
    assert sum(reason == "job_unreadable" for reason in letters.values()) == unreadable
    assert set(letters) <= set(ids[::2])


def test_an_upkeep_that_breaks_ends_nobody(redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Loop, "run_maintenance_tasks", broken)
    rules = settings(valkey_url)
    id = rig.submit(redis, rules, [answer()])
    rig.worker(redis, rules).serve(burst=True)
    assert rig.verdict_of(redis, id)["verdict"] == "unaudited"


def test_a_job_that_cannot_be_ended_is_a_dead_letter(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = settings(valkey_url)
    pool = rig.worker(redis, rules, {"toy": ToyReference()})
    bad, good = (rig.submit(redis, rules, [answer()]) for _ in range(2))
    whole: Any = Stages.answer
    broken: list[str] = []

    def once(self: Stages, id: str, *arguments: Any, **options: Any) -> None:
        if id == bad and not broken:
            broken.append(id)
            raise ZeroDivisionError
        whole(self, id, *arguments, **options)

    monkeypatch.setattr(Stages, "answer", once)
    pool.serve(burst=True)
    assert rig.verdict_of(redis, good)["audited"] is True
    assert "replay_failed: ZeroDivisionError" in rig.verdict_of(redis, bad)["reasons"]
    assert FairQueue(queue_of("toy"), connection=redis).failed_job_registry.get_job_ids() == [replay_job(bad)]
