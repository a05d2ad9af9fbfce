"""The recorder by itself: its bounds, and evidence that cannot be made."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import orjson
import pytest
import redis

from policies.evidence import Evidence, Sampling
from proxy.generation import Generation
from proxy.metrics import Metrics
from proxy.outage import Outage
from proxy.recorder import Recorder
from tests.support.running import settings_for
from tests.support.valkey import Valkey
from verifier_pool.queue import OUTBOX, evidence_key, intent_key, verdict_key


def _generation(id: str) -> Generation:
    return Generation(id=id, owner="o", endpoint="chat", model="m", mode="async", stream=False, backend="b1")


def _evidence(id: str) -> list[Evidence]:
    return [Evidence(id=id, endpoint="chat", backend="b1", model="m", sampling=Sampling())]


def _reasons(client: redis.Redis, id: str) -> list[str]:
    deadline = time.monotonic() + 5
    while (data := client.get(verdict_key(id))) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    reasons: list[str] = orjson.loads(data)["reasons"]
    return reasons


@pytest.fixture
def client(valkey: Valkey) -> Iterator[redis.Redis]:
    with valkey.client() as client:
        client.flushall()
        yield client


def _recorder(valkey: Valkey, **bounds: int) -> Recorder:
    webhook = {"url": "https://example.com/hook", "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}
    return Recorder(valkey.url, settings_for("http://127.0.0.1:9", webhook=webhook), Outage(), Metrics(), **bounds)


@pytest.mark.parametrize("bounds", [{"max_items": 1}, {"max_bytes": 150}])
def test_what_does_not_fit_is_shed(valkey: Valkey, client: redis.Redis, bounds: dict[str, int]) -> None:
    recorder = _recorder(valkey, **bounds)
    recorder.start()
    go = threading.Event()

    def slow() -> Sequence[Evidence]:
        go.wait(5)
        return _evidence("a" * 32)

    # The first is taken off the queue at once; the second fills it, the third finds no room.
    recorder.finished(_generation("a" * 32), slow, 100)
    time.sleep(0.2)
    recorder.finished(_generation("b" * 32), lambda: _evidence("b" * 32), 100)
    recorder.finished(_generation("c" * 32), lambda: _evidence("c" * 32), 100)
    go.set()
    assert _reasons(client, "c" * 32) == ["backlog"]
    recorder.stop()
    assert client.exists(evidence_key("a" * 32), evidence_key("b" * 32)) == 2
    assert client.zscore(OUTBOX, "c" * 32) is not None


def test_evidence_that_cannot_be_made_does_not_stop_the_thread(valkey: Valkey, client: redis.Redis) -> None:
    recorder = _recorder(valkey)
    recorder.start()
    client.set(intent_key("a" * 32), b"{}")

    def broken() -> Sequence[Evidence]:
        raise ValueError("secret content")

    recorder.finished(_generation("a" * 32), broken, 1)
    recorder.finished(_generation("b" * 32), list, 1)
    recorder.finished(_generation("c" * 32), lambda: _evidence("c" * 32), 1)
    assert _reasons(client, "a" * 32) == ["internal_error"]
    assert _reasons(client, "b" * 32) == ["no_answer"]
    recorder.stop()
    assert client.exists(evidence_key("c" * 32))


def test_the_first_verdict_stays(valkey: Valkey, client: redis.Redis) -> None:
    recorder = _recorder(valkey)
    recorder.start()
    recorder.unchecked(_generation("a" * 32), "no_answer")
    recorder.unchecked(_generation("a" * 32), "client_left")
    recorder.stop()
    assert _reasons(client, "a" * 32) == ["no_answer"]


def test_stop_writes_what_is_queued(valkey: Valkey, client: redis.Redis) -> None:
    recorder = _recorder(valkey)
    ids = [f"{n:032x}" for n in range(50)]
    for id in ids:
        recorder.finished(_generation(id), lambda id=id: _evidence(id), 1)  # type: ignore[misc]
    recorder.start()
    recorder.stop()
    assert client.exists(*map(evidence_key, ids)) == 50
