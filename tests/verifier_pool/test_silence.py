"""Connections that died without a word, and loops that hang: nothing waits for ever."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import TimeoutError as RedisTimeout
from rq.worker_registration import REDIS_WORKER_KEYS

from tests.support.waiting import PATIENCE
from tests.verifier_pool import rig
from tests.verifier_pool.relay import relayed
from tests.verifier_pool.toy import ToyReference, answer, settings
from verifier_pool import jobs, ready, runtime
from verifier_pool.link.queue import VERIFY_QUEUE
from verifier_pool.loop import Loop
from verifier_pool.store import Store

WORKER = """
import sys, threading
from tests.verifier_pool.rig import declaring
from tests.verifier_pool.toy import ToyReference, settings
from verifier_pool import context, runtime, worker
from verifier_pool.loop import Loop

runtime.ANSWER_SECONDS = Loop.connection_timeout = 3
Loop.pulse = 0.3
toy = ToyReference(threads=4)
context.open_references = lambda settings, second=False, model=None: {} if second else {"toy": toy}
worker.run(declaring(settings(sys.argv[1])), threading.Event())
"""


def test_a_worker_gets_over_connections_that_died_without_a_word(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    with relayed(valkey_url) as relay:
        process = rig.start(WORKER, relay.url)
        try:
            before = rig.submit(redis, rules, [answer()])
            assert rig.verdict_of(redis, before)["audited"] is True
            for _ in range(2):
                relay.silence()
                id = rig.submit(redis, rules, [answer()])
                assert rig.verdict_of(redis, id)["audited"] is True
            process.terminate()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            process.wait()


def test_every_client_of_a_worker_has_a_time_out_from_its_first_command_on(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "ANSWER_SECONDS", 3.0)
    with relayed(valkey_url) as relay:
        client = runtime.connect(settings(relay.url))
        client.ping()
        relay.silence()
        with pytest.raises(RedisTimeout):
            Store(client, verdict_ttl=60).audit_secret()
        client.ping()
        client.close()


def test_the_loop_keeps_the_time_out(redis: Redis, valkey_url: str) -> None:
    client = runtime.connect(settings(valkey_url))
    Loop(VERIFY_QUEUE, client, threading.Event(), on_failed=lambda *_: None)
    assert client.connection_pool.connection_kwargs["socket_timeout"] == runtime.ANSWER_SECONDS
    client.close()


HUNG = """
import sys, threading, time
from redis import Redis
from verifier_pool.loop import Loop
from verifier_pool.link.queue import VERIFY_QUEUE

Loop.pulse, Loop.hung_seconds = 0.1, 1.0
tick = (lambda: time.sleep(60)) if sys.argv[2] == "hangs" else (lambda: None)
Loop(VERIFY_QUEUE, Redis.from_url(sys.argv[1]), threading.Event(), on_failed=print, on_tick=tick).serve()
"""


def test_a_loop_that_hangs_between_jobs_ends_its_process(redis: Redis, valkey_url: str) -> None:
    process = rig.start(HUNG, valkey_url, "hangs")
    try:
        assert process.wait(PATIENCE) == 70
    finally:
        process.kill()
        process.wait()


def test_a_loop_that_waits_for_jobs_does_not_hang(redis: Redis, valkey_url: str) -> None:
    process = rig.start(HUNG.replace("hung_seconds = 0.1, 1.0", "hung_seconds = 0.1, 5.0"), valkey_url, "idle")
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(8)
    finally:
        process.kill()
        process.wait()


def test_a_job_that_took_long_is_no_loop_that_hangs(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(Loop, "hung_seconds", 2.0)
    monkeypatch.setattr(Loop, "pulse", 0.02)
    judge: Any = vars(jobs)["on_grounds"]

    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(3)
        return judge(*arguments, **options)

    monkeypatch.setattr(jobs, "on_grounds", slowly)
    id = rig.submit(redis, rules := settings(valkey_url, audit={"rate": 0.0}), [answer()])
    rig.worker(redis, rules).serve(burst=True)
    rig.verdict_of(redis, id)
    assert not ended


@pytest.mark.parametrize("lost", ["everything", "the record", "the list"])
def test_who_outlives_what_redis_knew_is_listed_again(redis: Redis, valkey_url: str, lost: str) -> None:
    stop, flying, landing = threading.Event(), threading.Event(), threading.Event()
    rules = rig.declaring(settings(valkey_url))
    expected = ready.expected(rules, None, None, None)

    def trouble(_requests: object) -> None:
        flying.set()
        landing.wait(PATIENCE)

    def listed() -> bool:
        return expected <= ready.queues_of(rules, socket.gethostname())

    def lose() -> list[bool]:
        try:
            assert flying.wait(PATIENCE)
            rig.wait_until(listed)
            if lost == "everything":
                redis.flushall()
            else:
                redis.delete(*([REDIS_WORKER_KEYS] if lost == "the list" else redis.smembers(REDIS_WORKER_KEYS)))
            gone = not listed()
            rig.wait_until(listed)
            return [gone, *(redis.ttl(key) > 0 for key in redis.smembers(REDIS_WORKER_KEYS))]
        finally:
            landing.set()
            stop.set()

    pool = rig.worker(redis, rules, {"toy": ToyReference(trouble, threads=1)}, stop)
    rig.submit(redis, rules, [answer()])
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(lose)
        pool.serve()
    assert found.result() == [True] * 3
    assert not redis.smembers(REDIS_WORKER_KEYS)
