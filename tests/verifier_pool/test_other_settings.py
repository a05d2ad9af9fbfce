"""What one worker asked for, another one judges whose settings know less: an old file is no reason to look away."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from redis import Redis

from tests.verifier_pool import rig
from tests.verifier_pool.audits import Second, declared, ready
from tests.verifier_pool.toy import ToyReference, answer, settings
from verifier_pool import context
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import VERIFY_JOB, VERIFY_QUEUE
from verifier_pool.packing import pack_outcomes
from verifier_pool.replays import outcome_key, request_key
from verifier_pool.store import Store
from verifier_pool.sweeper import sweep


def test_a_replay_counts_for_a_worker_that_knows_no_reference(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    id = rig.submit(redis, rules, [answer(salt=1)])
    pool = rig.worker(redis, rules, {"toy": ToyReference()})
    pool.loop.serve(burst=True)
    pool.replaying[0].serve(burst=True)
    assert redis.exists(outcome_key(id))
    rig.worker(redis, rules).serve(burst=True)
    assert rig.verdict_of(redis, id)["audited"] is True
    assert not redis.exists(outcome_key(id))


def test_a_replay_that_was_asked_for_is_waited_for(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    id = rig.submit(redis, rules, [answer()])
    rig.worker(redis, rules, {"toy": ToyReference()}).loop.serve(burst=True)
    ignorant = rig.worker(redis, rules)
    FairQueue(VERIFY_QUEUE, connection=redis).enqueue(VERIFY_JOB, id)
    assert ignorant.serve(burst=True) == 1
    store = Store(redis, verdict_ttl=600)
    assert not store.decided(id)
    assert redis.exists(request_key(id))
    sweep(store, rules.verification, now=time.time() + rules.verification.replay_wait + 1)
    ignorant.serve(burst=True)
    verification = rig.verdict_of(redis, id)
    assert (verification["verdict"], verification["audited"]) == ("inconclusive", True)
    assert "reference_backlog" in verification["reasons"]


@pytest.mark.parametrize("replayed", [False, True])
def test_a_second_reference_is_waited_for_likewise(redis: Redis, valkey_url: str, replayed: bool) -> None:
    rules = declared(valkey_url)
    pool = ready(redis, rules, ToyReference(), Second())
    id = rig.submit(redis, rules, [answer((40, 41), 48, salt=1)])
    for loop in (pool.loop, pool.replaying[0], pool.loop):
        loop.serve(burst=True)
    assert redis.exists(request_key(id, second=True))
    if replayed:
        pool.replaying[1].serve(burst=True)
    known = context.current()
    bare = rules.models["toy"].model_copy(update={"reference": None, "second_reference": None, "second_profile": None})
    context.use(replace(known, settings=rules.model_copy(update={"models": {"toy": bare}})))
    FairQueue(VERIFY_QUEUE, connection=redis).enqueue(VERIFY_JOB, id)
    pool.loop.serve(burst=True)
    assert known.store.decided(id) is replayed
    if not replayed:
        pool.replaying[1].serve(burst=True)
        pool.loop.serve(burst=True)
    verification = rig.verdict_of(redis, id)
    assert "distance" in verification["second_reference"]["confirmed"]


def test_an_outcome_that_comes_after_the_verdict_does_not_stay(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    pool = rig.worker(redis, rules, {"toy": ToyReference()})
    id = rig.submit(redis, rules, [answer()])
    pool.serve(burst=True)
    before = rig.verdict_of(redis, id)
    for second in (False, True):
        redis.set(outcome_key(id, second=second), pack_outcomes([]), ex=600)
        FairQueue(VERIFY_QUEUE, connection=redis).enqueue(VERIFY_JOB, id)
        pool.loop.serve(burst=True)
        assert not redis.exists(outcome_key(id, second=second))
    assert rig.verdict_of(redis, id) == before
