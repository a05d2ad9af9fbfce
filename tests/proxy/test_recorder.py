"""The recorder by itself: its bounds, and evidence that cannot be made."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
import redis
from rq.job import Job

from policies.evidence import Evidence, Sampling
from proxy.generation import Generation
from proxy.metrics import Metrics
from proxy.outage import Outage
from proxy.recorder import Recorder
from tests.support.redises import Server, wait_until
from tests.support.running import settings_for
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE, SOON
from verifier_pool.fair import FairQueue
from verifier_pool.queue import (
    OUTBOX,
    VERIFY_QUEUE,
    evidence_key,
    intent_key,
    units_key,
    verdict_key,
    waiting_bytes_key,
    waiting_key,
    waiting_sizes_key,
)
from verifier_pool.scripts import add_waiting, note_waiting, waiting_keys


def _generation(id: str) -> Generation:
    return Generation(id=id, owner="o", endpoint="chat", model="m", mode="async", stream=False, backend="b1")


def _evidence(id: str) -> list[Evidence]:
    return [Evidence(id=id, endpoint="chat", backend="b1", model="m", sampling=Sampling())]


def _reasons(client: redis.Redis, id: str) -> list[str]:
    deadline = time.monotonic() + PATIENCE
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

    taken = threading.Event()

    def slow() -> Sequence[Evidence]:
        taken.set()
        go.wait(PATIENCE)
        return _evidence("a" * 32)

    # The first is taken off the queue at once; the second fills it, the third finds no room.
    recorder.finished(_generation("a" * 32), slow, 100)
    assert taken.wait(PATIENCE)
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


def test_a_record_that_cannot_be_made_later_does_not_stop_the_thread(
    valkey: Valkey, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = _recorder(valkey)
    recorder._outage.failed(ConnectionError())
    for id in ("a" * 32, "b" * 32):
        recorder.unchecked(_generation(id), "no_answer")
    decide = recorder._decide

    def broken(generation: Generation, reason: str, tokens: int = 0) -> None:
        if generation.id == "a" * 32:
            raise ValueError("no JSON")
        decide(generation, reason, tokens)

    monkeypatch.setattr(recorder, "_decide", broken)
    recorder.start()
    assert _reasons(client, "b" * 32) == ["no_answer"]
    recorder.finished(_generation("c" * 32), lambda: _evidence("c" * 32), 1)
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


def _waits(client: redis.Redis, backend: str, count: int, at: float | None = None) -> None:
    """So many generations of a backend wait for their verdict."""
    for n in range(count):
        id = f"{backend}-{n}"
        client.zadd(waiting_key(backend), {id: time.time() if at is None else at})


def _shed(valkey: Valkey, client: redis.Redis, names: str, each: int, **rules: int) -> Counter[str]:
    """Record `each` responses per backend, no worker working; returns how many of which backend were shed."""
    metrics = Metrics()
    settings = settings_for("http://127.0.0.1:9", "http://127.0.0.1:10", verification=rules)
    recorder = Recorder(valkey.url, settings, Outage(), metrics)
    recorder.start()
    ids: dict[str, str] = {}
    for n in range(each):
        for number in names:
            id = f"{n:028x}{len(ids) % 16:02x}{number * 2}"
            ids[id] = f"b{number}"
            recorder.finished(replace(_generation(id), backend=f"b{number}"), lambda id=id: _evidence(id), 1)  # type: ignore[misc]
    recorder.stop(60)
    shed = Counter(backend for id, backend in ids.items() if client.exists(verdict_key(id)))
    page = metrics.page().decode()
    for backend, count in shed.items():
        assert f'countersign_unrecorded_total{{backend="{backend}",reason="backlog"}} {float(count)}' in page
    for id, backend in ids.items():
        if client.exists(verdict_key(id)):
            assert _reasons(client, id) == ["backlog"]
        else:
            assert client.zscore(waiting_key(backend), id) is not None
    metrics.close()
    return shed


def test_nothing_is_shed_below_half_the_limit(valkey: Valkey, client: redis.Redis) -> None:
    assert _shed(valkey, client, "12", 25, max_backlog=100) == {}


def test_a_flood_costs_its_own_backend(valkey: Valkey, client: redis.Redis) -> None:
    _waits(client, "b1", 90)
    _waits(client, "b2", 1)  # alone, b1 would have the whole queue for its share, and chance a say in its first answer
    shed = _shed(valkey, client, "12", 20, max_backlog=100)
    assert shed["b1"] == 20
    assert shed["b2"] == 0


def test_shedding_within_a_share_is_random(valkey: Valkey, client: redis.Redis) -> None:
    _waits(client, "b1", 30)
    _waits(client, "b2", 40)
    shed = _shed(valkey, client, "1", 60, max_backlog=100)
    waiting = client.zcard(waiting_key("b1"))
    assert 30 < waiting <= 50
    assert 40 <= shed["b1"] < 60


def test_what_waits_too_long_does_not_count(valkey: Valkey, client: redis.Redis) -> None:
    _waits(client, "b1", 90, at=time.time() - 7200)
    assert _shed(valkey, client, "1", 10, max_backlog=100, evidence_ttl=3600) == {}


def test_what_waits_is_known_though_nothing_comes(
    valkey: Valkey, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.room._IDLE_SECONDS", 0.0)
    metrics = Metrics()
    recorder = Recorder(valkey.url, settings_for("http://127.0.0.1:9"), Outage(), metrics)
    recorder.start()

    def shown() -> float:
        lines = metrics.page(private=True).decode().splitlines()
        return float(next((line for line in lines if line.startswith("countersign_backlog{")), "-1").split()[-1])

    wait_until(lambda: shown() == 0)
    _waits(client, "b1", 7)
    wait_until(lambda: shown() == 7)
    client.delete(waiting_key("b1"))
    wait_until(lambda: shown() == 0)
    recorder.stop()
    metrics.close()


def _big(id: str, tokens: int = 3000) -> list[Evidence]:
    """Evidence that hardly compresses."""
    rng = np.random.default_rng(int(id, 16) % 2**32)
    claim = rng.standard_normal((tokens, 20)).astype(np.float32)
    ids = rng.integers(0, 2**31, (tokens, 20), dtype=np.int32)
    return [replace(_evidence(id)[0], claim_ids=ids, claim_logprobs=claim, output_ids=ids[:, 0].copy())]


def _bytes_waiting(client: redis.Redis, backend: str = "b1") -> int:
    return int(client.get(waiting_bytes_key(backend)) or 0)


def test_bytes_are_counted_until_the_verdict(valkey: Valkey, client: redis.Redis) -> None:
    recorder = _recorder(valkey)
    recorder.start()
    ids = [f"{n:032x}" for n in range(3)]
    for id in ids:
        recorder.finished(_generation(id), lambda id=id: _big(id, 10), 1)  # type: ignore[misc]
    recorder.stop()
    sizes = [client.strlen(evidence_key(id)) for id in ids]
    assert _bytes_waiting(client) == sum(sizes)
    add_waiting(client, ids[0], "b1", 1000)
    add_waiting(client, "unknown", "b1", 1000)
    assert _bytes_waiting(client) == sum(sizes) + 1000
    again = _recorder(valkey)
    again.start()
    for id in (ids[0], ids[0], ids[1]):
        again.unchecked(_generation(id), "no_answer")
    again.stop()
    assert _bytes_waiting(client) == sizes[2]
    assert client.hkeys(waiting_sizes_key("b1")) == [ids[2].encode()]
    # What must have expired is taken off with the next that comes.
    note_waiting(client, "late", "b1", time.time() + 4000, 3600, 7)
    assert _bytes_waiting(client) == 7
    assert all(0 < client.ttl(key) <= 3600 for key in waiting_keys("b1"))


def test_too_many_bytes_are_shed(valkey: Valkey, client: redis.Redis) -> None:
    metrics = Metrics()
    settings = settings_for("http://127.0.0.1:9", verification={"max_backlog_bytes": 1_500_000})
    recorder = Recorder(valkey.url, settings, Outage(), metrics)
    recorder.start()
    ids = [f"{n:032x}" for n in range(16)]
    for id in ids:
        recorder.finished(_generation(id), lambda id=id: _big(id), 1)  # type: ignore[misc]
    huge = f"{99:032x}"
    recorder.finished(_generation(huge), lambda: _big(huge, 15_000), 1)
    recorder.stop(60)
    shed = [id for id in [*ids, huge] if client.exists(verdict_key(id))]
    assert huge in shed
    assert all(_reasons(client, id) == ["backlog"] and not client.exists(evidence_key(id)) for id in shed)
    held = sum(client.strlen(evidence_key(id)) for id in ids)
    assert 750_000 < held < 1_500_000
    assert _bytes_waiting(client) == held
    page = metrics.page(private=True).decode()
    assert f'countersign_unrecorded_total{{backend="b1",reason="backlog"}} {float(len(shed))}' in page
    assert 'countersign_backlog{backend="b1"}' in page
    assert 'countersign_backlog_size_bytes{backend="b1"}' in page
    assert "countersign_backlog" not in metrics.page().decode()
    metrics.close()


def test_a_full_redis_is_a_backlog(valkey: Valkey, client: redis.Redis) -> None:
    recorder, outage = _recorder(valkey), Outage()
    recorder._outage = outage
    recorder.start()
    used = int(client.info("memory")["used_memory"])
    client.config_set("maxmemory", used + 2_500_000)
    try:
        ids = [f"{n:032x}" for n in range(10)]
        for id in ids:
            recorder.finished(_generation(id), lambda id=id: _big(id), 1)  # type: ignore[misc]
        deadline = time.monotonic() + PATIENCE
        while sum(client.exists(verdict_key(id), evidence_key(id)) for id in ids) < len(ids):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with contextlib.suppress(redis.exceptions.OutOfMemoryError):
            client.append("filler", b"x" * 5_000_000)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.append("filler", b"x")
        kept = [id for id in ids if client.exists(evidence_key(id))]
        assert 0 < len(kept) < len(ids)
        for id in ids:
            if id not in kept:
                assert _reasons(client, id) == ["backlog"]
        # Workers can take what waits, and store verdicts, which makes room.
        queue = FairQueue(VERIFY_QUEUE, connection=client)
        assert sorted(queue.take(100)) == kept
        assert not outage.down
    finally:
        client.config_set("maxmemory", 0)
    recorder.stop()


@pytest.mark.parametrize("rules", [{"replicas": 1, "timeout": 0.2}, {"aof": True, "timeout": 0.2}])
def test_what_is_not_durable_is_not_recorded(valkey: Valkey, client: redis.Redis, rules: dict[str, object]) -> None:
    outage, metrics = Outage(), Metrics()
    recorder = Recorder(valkey.url, settings_for("http://127.0.0.1:9", durability=rules), outage, metrics)
    recorder.start()
    recorder.finished(_generation("a" * 32), lambda: _evidence("a" * 32), 1)
    deadline = time.monotonic() + PATIENCE
    while not outage.down:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(1)
    assert outage.down, "it is not over before a write is durable again"
    assert 'reason="store_unavailable"' in metrics.page().decode()
    recorder._settings = settings_for("http://127.0.0.1:9")
    assert _reasons(client, "a" * 32) == ["store_unavailable"]
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
            recorder.finished(_generation("a" * 32), lambda: _evidence("a" * 32), 1)
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
            recorder.finished(_generation(id), lambda id=id: _evidence(id), 1)  # type: ignore[misc]
        recorder.unchecked(_generation("f" * 32), "no_answer")
        recorder.start()
        began = time.monotonic()
        recorder.stop(PATIENCE)
        assert time.monotonic() - began < SOON
        assert not outage.down
        with server.client() as client:
            assert client.exists(*map(evidence_key, ids)) == 100
            assert sorted(FairQueue(VERIFY_QUEUE, connection=client).job_ids) == ids
            assert _reasons(client, "f" * 32) == ["no_answer"]
    finally:
        server.kill()


def test_lanes_tenants_and_costs(valkey: Valkey, client: redis.Redis) -> None:
    recorder = _recorder(valkey)
    recorder.start()
    for at, (mode, owner) in enumerate([("async", "x"), ("async", "x"), ("async", "y"), ("inline", "x")]):
        id = f"{at:032x}"
        generation = replace(_generation(id), mode=mode, owner=owner)
        evidence = replace(
            _evidence(id)[0], prompt_ids=np.arange(5, dtype=np.int32), output_ids=np.arange(7, dtype=np.int32)
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
    recorder = _recorder(valkey)
    ids = [f"{number:032x}" for number in range(20)]
    odd = ids[7]
    client.set(Job.key_for(odd), b"no job")
    for id in ids:
        recorder.finished(_generation(id), lambda id=id: _evidence(id), 1)  # type: ignore[misc]
    recorder.start()
    assert _reasons(client, odd) == ["internal_error"]
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
    recorder = _recorder(valkey)
    client.set(waiting_key("b1") if name == "waiting" else units_key("b1"), b"neither a list nor a set")
    recorder.start()
    recorder.finished(_generation("a" * 32), list, 1)
    wait_until(lambda: "could not be recorded" in caplog.text)
    client.delete(waiting_key("b1"), units_key("b1"))
    recorder.finished(_generation("c" * 32), lambda: _evidence("c" * 32), 1)
    recorder.stop()
    assert client.exists(evidence_key("c" * 32))
    assert not recorder._outage.down
