"""Processes that send: one comes with the worker, several are killed, and a receiver stalls one."""

from __future__ import annotations

import threading
import time
from typing import Any

import orjson
from redis import Redis

from policies.settings import Settings
from policies.verification import unverified
from tests.support.waiting import PATIENCE
from tests.verifier_pool import rig
from tests.verifier_pool.receiver import Receiver, listening, status
from tests.verifier_pool.test_webhooks import SECRET, hooked
from tests.verifier_pool.toy import answer
from verifier_pool import RQ_PREFIX
from verifier_pool.link import deliveries, receivers
from verifier_pool.link.endpoints import SETTINGS
from verifier_pool.link.sealing import Sealer
from verifier_pool.store import Store


def _configured(path: str, rules: Settings) -> str:
    tree = rules.model_dump(mode="json", exclude_defaults=True)
    if rules.webhook is not None:
        tree["webhook"]["secret"] = SECRET
    with open(f"{path}/countersign.yaml", "wb") as file:
        file.write(orjson.dumps(tree))
    return f"{path}/countersign.yaml"


def test_the_worker_brings_its_own_webhook_process(redis: Redis, valkey_url: str, tmp_path: object) -> None:
    with listening(Receiver(status(200))) as receiver:
        rules = hooked(valkey_url, receiver)
        code = "import sys; from verifier_pool.worker import main; sys.exit(main(sys.argv[1:]))"
        process = rig.start(code, "--config", _configured(str(tmp_path), rules))
        try:
            id = rig.submit(redis, rules, [answer()])
            rig.wait_until(lambda: receiver.requests)
            assert orjson.loads(receiver.requests[0][1])["data"]["id"] == id
            rig.wait_until(lambda: redis.scard(RQ_PREFIX + ":workers") == 1 + rules.deliveries.senders)
        finally:
            process.terminate()
            assert process.wait(PATIENCE) == 0
        assert redis.scard(RQ_PREFIX + ":workers") == 0


def test_no_event_is_lost_over_kill_9(redis: Redis, valkey_url: str, tmp_path: object) -> None:
    """Senders are killed while they send; every event arrives, with one body each."""
    ids, got = [f"{n:032x}" for n in range(20)], threading.Event()

    def slow(handler: Any) -> None:
        got.set()
        time.sleep(0.02)
        status(200)(handler)

    with listening(Receiver(slow)) as receiver:
        path = _configured(str(tmp_path), hooked(valkey_url, receiver, (1, 1, 1), deliveries={"senders": 4}))
        code = (
            "import sys; from verifier_pool.loop import Loop; Loop.patience = 2; Loop.pulse = 0.5;"
            "from verifier_pool import rq_job; rq_job.STRANDED_SECONDS = 1;"
            "from verifier_pool.link import deliveries; deliveries.LEASE_SECONDS = 2;"
            "deliveries.RETRY_SECONDS = (1, 1, 1);"
            "from verifier_pool.worker import main; sys.exit(main(sys.argv[1:]))"
        )
        store = Store(redis, verdict_ttl=600, webhook=True)
        for id in ids:
            store.settle(unverified(id, "backlog", None, 5.5), None)
        for _ in range(2):
            got.clear()
            process = rig.start(code, "--config", path, "--only", "webhooks")
            assert got.wait(PATIENCE)
            process.kill()
            process.wait()
        process = rig.start(code, "--config", path, "--only", "webhooks")
        try:
            rig.wait_until(lambda: {orjson.loads(body)["data"]["id"] for _, body in receiver.requests} == set(ids))
            rig.wait_until(lambda: not redis.zcard(deliveries.waiting_key(SETTINGS)))
        finally:
            process.terminate()
            process.wait(PATIENCE)
    bodies = {(headers["webhook-id"], body) for headers, body in receiver.requests}
    assert len(bodies) == len(ids)
    assert {orjson.loads(body)["sequence"] for _, body in bodies} == set(range(1, len(ids) + 1))


def test_a_receiver_that_stalls_holds_up_nobody_else(redis: Redis, valkey_url: str, tmp_path: object) -> None:
    """One webhook takes requests and never answers; what is for another arrives meanwhile."""
    stalled, over = threading.Event(), threading.Event()

    def stall(handler: Any) -> None:
        stalled.set()
        over.wait(PATIENCE)

    with listening(Receiver(stall)) as bad, listening(Receiver(status(200))) as good:
        rules = hooked(valkey_url, good, deliveries={"networks": ["127.0.0.0/8"], "ports": []})
        _register(redis, rules, bad.url)
        path = _configured(str(tmp_path), rules)
        code = "import sys; from verifier_pool.worker import main; sys.exit(main(sys.argv[1:]))"
        process = rig.start(code, "--config", path, "--only", "webhooks")
        try:
            rig.wait_until(stalled.is_set)
            store = Store(redis, verdict_ttl=600, webhook=True)
            for n in range(5):
                store.settle(unverified(f"{n:032x}", "backlog", None, 5.5), None)
            rig.wait_until(lambda: len(good.requests) == 5)
            assert len(bad.requests) <= 2
        finally:
            over.set()
            process.kill()
            process.wait()


def _register(redis: Redis, rules: Settings, url: str) -> None:
    receivers.register(receivers.House(redis, rules, Sealer()), receivers.Asker("test"), url, {})
