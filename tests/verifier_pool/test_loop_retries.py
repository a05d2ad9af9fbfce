"""A retry that is put off: whoever dies on the way leaves a job that still comes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from redis import Redis
from rq import Queue, Retry
from rq.job import JobStatus
from rq.serializers import JSONSerializer
from rq.utils import now

from tests.verifier_pool import rig
from tests.verifier_pool.crashes import survives
from tests.verifier_pool.toy import settings
from verifier_pool.link.fair import FairQueue, options
from verifier_pool.link.queue import VERIFY_JOB, VERIFY_QUEUE
from verifier_pool.rq_job import STRANDED_SECONDS, OurJob

ID = "a" * 32


def retried(job: OurJob, queue: Queue, redis: Redis) -> None:
    """As for a job whose worker died."""
    with redis.pipeline() as pipeline:
        job.retry(queue, pipeline)
        pipeline.execute()


def asked_again(job: OurJob, queue: Queue, redis: Redis) -> None:
    """As for a job that says when to come again."""
    with redis.pipeline() as pipeline:
        job._handle_retry_result(queue, pipeline, Retry(max=3, interval=5), "x", now(), now())
        pipeline.execute()


@pytest.mark.parametrize("again", [retried, asked_again])
def test_a_job_is_said_to_be_scheduled_only_when_it_is(
    redis: Redis, valkey_url: str, again: Callable[[OurJob, Queue, Redis], None]
) -> None:
    queue = FairQueue(VERIFY_QUEUE, connection=redis)
    kept = options(ID, settings(valkey_url).verification, inline=False, tenant="t", tokens=1, size=1)

    def work() -> None:
        with Redis.from_url(valkey_url) as own:
            job = OurJob.fetch(ID, connection=own, serializer=JSONSerializer)
            assert isinstance(job, OurJob)
            again(job, FairQueue(VERIFY_QUEUE, connection=own), own)

    command, finished = 0, False
    while not finished:
        redis.flushall()
        queue.enqueue(VERIFY_JOB, ID, **kept)
        redis.hset(OurJob.key_for(ID), "status", JobStatus.STARTED.value)
        finished = survives(work, command)
        scheduled = ID in queue.scheduled_job_registry.get_job_ids(cleanup=False)
        said = OurJob.fetch(ID, connection=redis, serializer=JSONSerializer).get_status() == JobStatus.SCHEDULED
        assert said is scheduled
        command += 1
    assert scheduled
    due = redis.zscore(queue.scheduled_job_registry.key, ID)
    assert due is not None
    assert due <= time.time() + 10


def test_a_job_that_was_taken_and_never_begun_comes_again_in_seconds(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    (queue,) = rig.worker(redis, rules).loop.queues
    kept = options(ID, rules.verification, inline=False, tenant="t", tokens=1, size=1)
    queue.enqueue(VERIFY_JOB, ID, **kept)
    assert isinstance(queue, FairQueue)
    assert queue.take(1) == [ID]
    worker = rig.worker(redis, rules).loop
    worker.clean_registries()  # type: ignore[no-untyped-call]
    assert queue.scheduled_job_registry.get_job_ids(cleanup=False) == []
    seen = queue.intermediate_queue.get_first_seen_key(ID)
    assert 0 < redis.ttl(seen) <= 8 * STRANDED_SECONDS
    redis.set(seen, time.time() - STRANDED_SECONDS - 1)
    worker.clean_registries()  # type: ignore[no-untyped-call]
    assert queue.scheduled_job_registry.get_job_ids(cleanup=False) == [ID]
    assert queue.intermediate_queue.get_job_ids() == []
    # Its retry is another taking, and has its own time.
    assert not redis.exists(seen)
