"""One replay loop: what it takes, what it holds at once, and in which order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from redis import Redis
from rq.job import Job

from tests.support.waiting import PATIENCE
from tests.verifier_pool import rig
from tests.verifier_pool.flying import Running, Told, letters, submit
from tests.verifier_pool.toy import ToyReference, answer, settings
from verifier_pool.link.fair import FairQueue
from verifier_pool.replays import REPLAYING, queue_of, replay_job, request_key


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    rig.no_waits(monkeypatch)


def test_hundreds_are_in_flight_at_once(
    redis: Redis, valkey_url: str, told: Told, running: Callable[..., Running]
) -> None:
    ids = submit(redis, valkey_url, 300)
    running(told)
    rig.wait_until(lambda: len(told.held) == 256)
    time.sleep(0.2)
    assert len(told.held) == 256
    told.let(100)
    rig.wait_until(lambda: len(told.held) == 200)
    told.let()
    for id in ids:
        assert rig.verdict_of(redis, id)["audited"] is True
    assert (len(told.seen), told.most) == (300, 256)
    assert not redis.exists(REPLAYING, *(request_key(id) for id in ids))
    # Jobs whose result nobody reads leave nothing behind.
    rig.wait_until(lambda: not redis.exists(*(Job.key_for(replay_job(id)) for id in ids)))


def test_the_tokens_in_flight_are_bounded_and_one_longer_replay_runs_alone(
    redis: Redis, valkey_url: str, told: Told, running: Callable[..., Running]
) -> None:
    rules = settings(valkey_url)
    short = [rig.submit(redis, rules, [answer(length=17)]) for _ in range(8)]
    long = rig.submit(redis, rules, [answer(length=200)])
    running(told, max_in_flight_tokens=100)
    for _ in range(2):
        rig.wait_until(lambda: len(told.held) == 5 or (told.held and len(told.seen) == 8))
        assert sum(request.tokens for request, _ in told.held) <= 100
        told.let()
    rig.wait_until(lambda: len(told.seen) == 9)
    assert [request.tokens for request, _ in told.held] == [203]
    told.let()
    for id in [*short, long]:
        rig.verdict_of(redis, id)


def test_the_longest_first(redis: Redis, valkey_url: str, told: Told, running: Callable[..., Running]) -> None:
    rules = settings(valkey_url)
    ids = [rig.submit(redis, rules, [answer(length=length)]) for length in (3, 9, 5, 20, 7)]
    pool = rig.worker(redis, rules, {"toy": told})
    pool.loop.serve(burst=True)
    running(told)
    rig.wait_until(lambda: len(told.held) == 5)
    assert [len(request.output_ids) for request in told.seen] == [20, 9, 7, 5, 3]
    told.let()
    for id in ids:
        rig.verdict_of(redis, id)


def test_what_the_reference_cannot_hold_is_too_long(redis: Redis, valkey_url: str, told: Told) -> None:
    told.max_tokens = 14
    (id,) = submit(redis, valkey_url, 1)
    rig.worker(redis, settings(valkey_url), {"toy": told}).serve(burst=True)
    assert "too_long" in rig.verdict_of(redis, id)["reasons"]
    assert told.seen == []


def test_choices_of_one_response_fly_together(
    redis: Redis, valkey_url: str, told: Told, running: Callable[..., Running]
) -> None:
    first = answer()
    choices = [first, replace(answer((3, 5, 9)), id=first.id, index=1), replace(answer(), id=first.id, index=2)]
    empty = np.zeros(0, np.int32)
    choices[2] = replace(choices[2], prompt_ids=empty)
    id = rig.submit(redis, settings(valkey_url), choices)
    told.failing = lambda request: "too_long" if request.prompt_ids[-1] == 9 else None
    running(told)
    rig.wait_until(lambda: len(told.held) == 2)
    told.let(1)
    time.sleep(0.1)
    told.let()
    found = [
        next(check["reason"] for check in choice["checks"] if check["name"] == "distance")
        for choice in rig.verdict_of(redis, id)["choices"]
    ]
    assert found[0] not in ("too_long", "nothing_to_replay")
    assert found[1:] == ["too_long", "nothing_to_replay"]


def test_a_job_without_its_request_does_nothing(redis: Redis, valkey_url: str) -> None:
    reference = ToyReference()
    (id,) = submit(redis, valkey_url, 1)
    pool = rig.worker(redis, settings(valkey_url), {"toy": reference})
    pool.loop.serve(burst=True)
    redis.delete(request_key(id))
    assert pool.replaying[0].serve(burst=True) == 1
    assert (reference.seen, letters(redis)) == ([], [])


@pytest.mark.parametrize("function", ["os.getcwd", "verifier_pool.jobs.verify"])
def test_only_replays_are_run(redis: Redis, valkey_url: str, function: str) -> None:
    queue = FairQueue(queue_of("toy"), connection=redis)
    queue.enqueue(function, "x", job_id="intruder")
    (id,) = submit(redis, valkey_url, 1)
    rig.worker(redis, settings(valkey_url), {"toy": ToyReference()}).serve(burst=True)
    assert letters(redis) == ["intruder"]
    assert rig.verdict_of(redis, id)["audited"] is True


def test_two_loops_share_a_queue_without_doing_anything_twice(
    redis: Redis, valkey_url: str, running: Callable[..., Running]
) -> None:
    ids = submit(redis, valkey_url, 200)
    began = [threading.Event(), threading.Event()]

    def both_at_work(mine: int) -> None:
        began[mine].set()
        assert began[1 - mine].wait(PATIENCE)

    references = [ToyReference(lambda _, mine=mine: both_at_work(mine), threads=8) for mine in range(2)]  # type: ignore[misc]
    for reference in references:
        running(reference, max_in_flight=8)
    for id in ids:
        rig.verdict_of(redis, id)
    counts = [len(reference.seen) for reference in references]
    assert sum(counts) == 200
    assert min(counts) > 0
