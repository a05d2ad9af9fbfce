"""What the tests of the recorder share."""

from __future__ import annotations

import time
from typing import Any

import orjson
import redis

from policies.evidence import Evidence, Sampling
from proxy.generation import Generation
from proxy.metrics import Metrics
from proxy.outage import Outage
from proxy.recorder import Recorder
from tests.support.running import settings_for
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE
from verifier_pool.link.queue import verdict_key


def new_generation(id: str) -> Generation:
    return Generation(id=id, owner="o", endpoint="chat", model="m", mode="async", stream=False, backend="b1")


def new_evidence(id: str) -> list[Evidence]:
    return [Evidence(id=id, endpoint="chat", backend="b1", model="m", sampling=Sampling())]


def reasons_of(client: redis.Redis, id: str) -> list[str]:
    deadline = time.monotonic() + PATIENCE
    while (data := client.get(verdict_key(id))) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    reasons: list[str] = orjson.loads(data)["reasons"]
    return reasons


def new_recorder(valkey: Valkey, **bounds: Any) -> Recorder:
    webhook = {"url": "https://example.com/hook", "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}
    return Recorder(valkey.url, settings_for("http://127.0.0.1:9", webhook=webhook), Outage(), Metrics(), **bounds)
