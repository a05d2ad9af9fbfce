"""The recorder by itself: its bounds, and evidence that cannot be made."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import redis
from rq.job import Job

from policies.evidence import Evidence
from proxy.generation import Generation
from proxy.metrics import Metrics
from proxy.outage import Outage
from proxy.recorder import Recorder
from tests.proxy.recording import new_evidence, new_generation, new_recorder, reasons_of
from tests.support.redises import Server, wait_until
from tests.support.running import settings_for
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import (
    OUTBOX,
    VERIFY_QUEUE,
    evidence_key,
    intent_key,
    units_key,
    verdict_key,
    waiting_key,
)


@pytest.fixture
def client(valkey: Valkey) -> Iterator[redis.Redis]:
    with valkey.client() as client:
        client.flushall()
        yield client


@pytest.mark.parametrize("bounds", [{"max_items": 1}, {"max_bytes": 150}])
def test_what_does_not_fit_is_shed(valkey: Valkey, client: redis.Redis, bounds: dict[str, int]) -> None:
    recorder = new_recorder(valkey, **bounds)
    recorder.start()
    go = threading.Event()

    taken = threading.Event()

    def slow() -> Sequence[Evidence]:
        taken.set()
        go.wait(PATIENCE)
        return new_evidence("a" * 32)

    # The first is taken off the queue at once; the second fills it, the third finds no room.
    recorder.finished(new_generation("a" * 32), slow, 100)
    assert taken.wait(PATIENCE)
    recorder.finished(new_generation("b" * 32), lambda: new_evidence("b" * 32), 100)
    recorder.finished(new_generation("c" * 32), lambda: new_evidence("c" * 32), 100)
    go.set()
    assert reasons_of(client, "c" * 32) == ["backlog"]
    recorder.stop()
    assert client.exists(evidence_key("a" * 32), evidence_key("b" * 32)) == 2
    assert client.zscore(OUTBOX, "c" * 32) is not None


def test_evidence_that_cannot_be_made_does_not_stop_the_thread(valkey: Valkey, client: redis.Redis) -> None:
    recorder = new_recorder(valkey)
    recorder.start()
    client.set(intent_key("a" * 32), b"{}")

    def broken() -> Sequence[Evidence]:
        raise ValueError("secret content")

    recorder.finished(new_generation("a" * 32), broken, 1)
    recorder.finished(new_generation("b" * 32), list, 1)
    recorder.finished(new_generation("c" * 32), lambda: new_evidence("c" * 32), 1)
    assert reasons_of(client, "a" * 32) == ["internal_error"]
    assert reasons_of(client, "b" * 32) == ["no_answer"]
    recorder.stop()
    assert client.exists(evidence_key("c" * 32))


@pytest.mark.parametrize(("took", "anew"), [(5, False), (900, True)])
def test_evidence_that_is_late_comes_with_its_intent(
    valkey: Valkey, client: redis.Redis, took: int, anew: bool
) -> None:
    """The one from before the request may be gone by then, and with it what may be kept, and whose it is."""
    recorder = new_recorder(valkey)
    recorder.start()
    generation = new_generation("a" * 32)
    generation.created, generation.retain, generation.owner = time.time() - took, "none", "somebody"
    recorder.finished(generation, lambda: new_evidence("a" * 32), 1)
    recorder.stop()
    assert client.exists(evidence_key("a" * 32))
    intent = json.loads(client.get(intent_key("a" * 32)) or b"{}")
    assert (intent.get("retain"), intent.get("owner")) == (("none", "somebody") if anew else (None, None))
    assert client.ttl(intent_key("a" * 32)) >= client.ttl(evidence_key("a" * 32)) or not anew


def test_a_record_that_cannot_be_made_later_does_not_stop_the_thread(
    valkey: Valkey, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = new_recorder(valkey)
    recorder._outage.failed(ConnectionError())
    for id in ("a" * 32, "b" * 32):
        recorder.unchecked(new_generation(id), "no_answer")
    decide = recorder._decide

    def broken(generation: Generation, reason: str, tokens: int = 0) -> None:
        if generation.id == "a" * 32:
            raise ValueError("no JSON")
        decide(generation, reason, tokens)

    monkeypatch.setattr(recorder, "_decide", broken)
    recorder.start()
    assert reasons_of(client, "b" * 32) == ["no_answer"]
    recorder.finished(new_generation("c" * 32), lambda: new_evidence("c" * 32), 1)
    recorder.stop()
    assert client.exists(evidence_key("c" * 32))


def test_the_first_verdict_stays(valkey: Valkey, client: redis.Redis) -> None:
    recorder = new_recorder(valkey)
    recorder.start()
    recorder.unchecked(new_generation("a" * 32), "no_answer")
    recorder.unchecked(new_generation("a" * 32), "client_left")
    recorder.stop()
    assert reasons_of(client, "a" * 32) == ["no_answer"]


def test_stop_writes_what_is_queued(valkey: Valkey, client: redis.Redis) -> None:
    recorder = new_recorder(valkey)
    ids = [f"{n:032x}" for n in range(50)]
    for id in ids:
        recorder.finished(new_generation(id), lambda id=id: new_evidence(id), 1)  # type: ignore[misc]
    recorder.start()
    recorder.stop()
    assert client.exists(*map(evidence_key, ids)) == 50


@pytest.mark.parametrize("rules", [{"replicas": 1, "timeout": 0.2}, {"aof": True, "timeout": 0.2}])
def test_what_is_not_durable_is_not_recorded(valkey: Valkey, client: redis.Redis, rules: dict[str, object]) -> None:
    outage, metrics = Outage(), Metrics()
    recorder = Recorder(valkey.url, settings_for("http://127.0.0.1:9", durability=rules), outage, metrics)
    recorder.start()
    recorder.finished(new_generation("a" * 32), lambda: new_evidence("a" * 32), 1)
    deadline = time.monotonic() + PATIENCE
    while not outage.down:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(1)
    assert outage.down, "it is not over before a write is durable again"
    assert 'reason="store_unavailable"' in metrics.page().decode()
    recorder._settings = settings_for("http://127.0.0.1:9")
    assert reasons_of(client, "a" * 32) == ["store_unavailable"]
    recorder.stop()
    metrics.close()


def test_what_is_durable_is_recorded(tmp_path: Path) -> None:
    first = Server(tmp_path / "a", "--appendonly", "yes").start()
    second = Server(tmp_path / "b", "--appendonly", "yes", "--replicaof", "127.0.0.1", str(first.port)).start()
    try:
        with first.client() as client:
            wait_until(lambda: client.execute_command("WAITAOF", 1, 1, 2000) == [1, 1])
            rules = {"aof": True, "replicas": 1, "timeout": 5.0}
            settings, outage = settings_for("http://127.0.0.1:9", durability=rules), Outage()
            recorder = Recorder(f"redis://127.0.0.1:{first.port}", settings, outage, Metrics())
            recorder.start()
            recorder.finished(new_generation("a" * 32), lambda: new_evidence("a" * 32), 1)
            recorder.stop()
            assert not outage.down
        first.kill()
        with second.client() as client:
            assert client.exists(evidence_key("a" * 32))
            assert FairQueue(VERIFY_QUEUE, connection=client).job_ids == ["a" * 32]
    finally:
        first.kill()
        second.kill()


def test_many_share_one_wait_for_durability(tmp_path: Path) -> None:
    """The file is synced once a second, and a hundred answers do not take a hundred seconds."""
    server = Server(tmp_path / "a", "--appendonly", "yes", "--appendfsync", "everysec").start()
    try:
        settings, outage = settings_for("http://127.0.0.1:9", durability={"aof": True, "timeout": 5.0}), Outage()
        recorder = Recorder(f"redis://127.0.0.1:{server.port}", settings, outage, Metrics())
        ids = [f"{n:032x}" for n in range(100)]
        for id in ids:
            recorder.finished(new_generation(id), lambda id=id: new_evidence(id), 1)  # type: ignore[misc]
        recorder.unchecked(new_generation("f" * 32), "no_answer")
        recorder.start()
        recorder.stop(PATIENCE)
        assert not outage.down
        with server.client() as client:
            assert client.exists(*map(evidence_key, ids)) == 100
            assert sorted(FairQueue(VERIFY_QUEUE, connection=client).job_ids) == ids
            assert reasons_of(client, "f" * 32) == ["no_answer"]
    finally:
        server.kill()


def test_lanes_tenants_and_costs(valkey: Valkey, client: redis.Redis) -> None:
    recorder = new_recorder(valkey)
    recorder.start()
    for at, (mode, owner) in enumerate([("async", "x"), ("async", "x"), ("async", "y"), ("inline", "x")]):
        id = f"{at:032x}"
        generation = replace(new_generation(id), mode=mode, owner=owner)
        evidence = replace(
            new_evidence(id)[0], prompt_ids=np.arange(5, dtype=np.int32), output_ids=np.arange(7, dtype=np.int32)
        )
        recorder.finished(generation, lambda evidence=evidence: [evidence, evidence], 1)  # type: ignore[misc]
    recorder.stop()
    queue = FairQueue(VERIFY_QUEUE, connection=client)
    first, *rest, last = [job.meta for job in queue.jobs]
    assert (first["lane"], first["tenant"], first["tokens"]) == (2, "x", 24)
    assert {each["tenant"] for each in rest} == {"x", "y"}
    assert last["tenant"] == "x"
    assert first["size"] == client.strlen(evidence_key(f"{3:032x}"))


def test_what_is_wrong_under_one_name_is_no_outage(valkey: Valkey, client: redis.Redis) -> None:
    """A batch in which one generation cannot be written."""
    recorder = new_recorder(valkey)
    ids = [f"{number:032x}" for number in range(20)]
    odd = ids[7]
    client.set(Job.key_for(odd), b"no job")
    for id in ids:
        recorder.finished(new_generation(id), lambda id=id: new_evidence(id), 1)  # type: ignore[misc]
    recorder.start()
    assert reasons_of(client, odd) == ["internal_error"]
    recorder.stop()
    assert not recorder._outage.down
    others = [id for id in ids if id != odd]
    assert client.exists(*map(evidence_key, others)) == len(others)
    assert not client.exists(*map(verdict_key, others))
    assert set(others) <= set(FairQueue(VERIFY_QUEUE, connection=client).get_job_ids())


@pytest.mark.parametrize("name", ["waiting", "units"])
def test_what_is_wrong_under_a_name_of_all_ends_no_thread(
    valkey: Valkey, client: redis.Redis, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = new_recorder(valkey)
    client.set(waiting_key("b1") if name == "waiting" else units_key("b1"), b"neither a list nor a set")
    recorder.start()
    recorder.finished(new_generation("a" * 32), list, 1)
    wait_until(lambda: "could not be recorded" in caplog.text)
    client.delete(waiting_key("b1"), units_key("b1"))
    recorder.finished(new_generation("c" * 32), lambda: new_evidence("c" * 32), 1)
    recorder.stop()
    assert client.exists(evidence_key("c" * 32))
    assert not recorder._outage.down
