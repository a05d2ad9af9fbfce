"""What a worker that dies leaves behind, at whatever moment: one verdict and one unit in the end."""

from __future__ import annotations

import random
import threading
import time
from typing import cast

import pytest
from redis import Redis

from policies import jws
from policies.receipt import leaf_of, verify_receipt
from policies.verification import public
from tests.verifier_pool import rig
from tests.verifier_pool.audits import WEBHOOK, Second, declared, ready
from tests.verifier_pool.crashes import survives, together
from tests.verifier_pool.sick import Sick, SickSecond
from tests.verifier_pool.told import events, outbox, push, record, told
from tests.verifier_pool.toy import ToyReference, answer, settings
from verifier_pool import context, jobs, rq_job, worker
from verifier_pool.link.log import Log
from verifier_pool.link.queue import (
    OPEN,
    OUTBOX,
    UNFOLDED,
    units_key,
    verdict_key,
)
from verifier_pool.link.receipts import receipt_of
from verifier_pool.link.signing import Signer
from verifier_pool.loop import Loop
from verifier_pool.reference import canary
from verifier_pool.replays import REPLAYING, outcome_key, request_key, vouching_key
from verifier_pool.standing import Standings
from verifier_pool.sweeper import sweep
from verifier_pool.vouching import Vouching


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    rig.no_waits(monkeypatch)


def both(kind: str, wrong: bool) -> tuple[ToyReference, ToyReference]:
    if kind == "without canaries":
        return ToyReference(), Second()
    return Sick(wrong=wrong), SickSecond()


@pytest.mark.parametrize("kind", ["without canaries", "sound", "wrong"])
def test_a_worker_killed_at_any_command_leaves_one_verdict_and_one_unit(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # What a dead worker held is found at once.
    monkeypatch.setattr(Loop, "patience", 0)
    monkeypatch.setattr(rq_job, "STRANDED_SECONDS", -1)
    monkeypatch.setattr(canary, "WANTED_SECONDS", 0.0)
    rules = declared(valkey_url, webhook=WEBHOOK)
    # While the first reference is wrong, an honest answer looks like a cheat's.
    evidence = answer((40, 41), 48, kernels=99) if kind == "wrong" else answer((40, 41), 48, salt=1)

    def work() -> None:
        ready(Redis.from_url(valkey_url), rules, *both(kind, kind == "wrong")).serve(burst=True)

    # At every command takes minutes; in time, each of them has its turn.
    step = 6 if kind == "without canaries" else 17
    command, ended, before = random.randrange(step), False, set[str]()
    while not ended:
        redis.flushall()
        # An older declaration, so that the first unit of this one brings an event with it.
        push(redis, told(settings(valkey_url)))
        Standings(redis, rules).fold("honest")
        rig.submit(redis, rules, [evidence])
        ended = survives(work, command)
        # Another worker finds what is left.
        before.add(where(redis, evidence.id))
        pool = ready(redis, rules, *both(kind, False))
        for alive in cast("list[bytes]", redis.keys("*canary-alive*")):
            redis.delete(alive)  # in time
        for _ in range(3):
            for each in (pool.loop, *pool.replaying):
                each.run_maintenance_tasks()  # type: ignore[no-untyped-call]
            Vouching(context.current().stages).sweep(time.time())
            pool.serve(burst=True)
        if not context.current().store.decided(evidence.id):
            redis.zadd(OPEN, {evidence.id: 1})
            sweep(context.current().store, rules.verification)
            pool.serve(burst=True)
        context.current().standings.fold_left(60)
        verification = context.current().store.verdict(evidence.id)
        assert verification is not None, command
        found = record(redis, rules)
        assert (found.coverage.generations, found.n) == (1, 1)
        if kind == "wrong":
            assert verification["verdict"] == "pass", command
            assert not found.accusing
        else:
            assert verification["verdict"] == "reject"
            assert "distance" in verification["second_reference"]["confirmed"]
            assert [entry.id for entry in found.accusing] == [evidence.id]
        stored = receipt_of(redis, evidence.id)
        assert stored is not None, command
        signed = verify_receipt(stored.token, keys_of(redis), id=evidence.id)
        assert signed.verification == public(verification), command
        assert signed.leaf in leaves_of(redis), command
        assert len(leaves_of(redis)) == 1, command
        assert outbox(redis).count(evidence.id) == 1
        assert [event["type"] for event in events(redis)] == ["backend.redeclared"]
        assert not redis.exists(units_key("honest"), UNFOLDED, REPLAYING)
        assert not redis.keys("*canary-wanted:*")
        command += step
    again = {"asked again", "replayed again"} if kind != "wrong" else set[str]()
    waited = {"waiting"} if kind == "sound" else set[str]()
    assert before >= {"recorded", "asked", "replayed", "decided"} | again | waited


def where(redis: Redis, id: str) -> str:
    """How far a response has come."""
    keys = [
        verdict_key(id),
        outcome_key(id, second=True),
        request_key(id, second=True),
        vouching_key(id),
        outcome_key(id),
        request_key(id),
    ]
    words = ["decided", "replayed again", "asked again", "waiting", "replayed", "asked"]
    return next((word for key, word in zip(keys, words, strict=True) if redis.exists(key)), "recorded")


def keys_of(redis: Redis) -> jws.Keys:
    """What receipts are signed with."""
    return jws.keys_in(jws.jwk_set(Signer(redis).published()))


def leaves_of(redis: Redis) -> list[bytes]:
    """What is in their log."""
    log = Log(redis, Signer(redis))
    return log.entries(0, log.state().size)


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
    receipts = [receipt_of(redis, evidence.id) for evidence in answers]
    assert sorted(leaf_of(each.token) for each in receipts if each) == sorted(leaves_of(redis))
    assert len(leaves_of(redis)) == 60
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
