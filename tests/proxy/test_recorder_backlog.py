"""What waits is bounded, in number and bytes, by backend; what is over is shed."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import redis

from policies.evidence import Evidence
from proxy import room
from proxy.metrics import Metrics
from proxy.outage import Outage
from proxy.recorder import Recorder
from tests.proxy.recording import new_evidence, new_generation, new_recorder, reasons_of
from tests.support.redises import wait_until
from tests.support.running import settings_for
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import (
    VERIFY_QUEUE,
    evidence_key,
    verdict_key,
    waiting_bytes_key,
    waiting_key,
    waiting_sizes_key,
)
from verifier_pool.link.scripts import add_waiting, note_waiting, waiting_keys


@pytest.fixture
def client(valkey: Valkey) -> Iterator[redis.Redis]:
    with valkey.client() as client:
        client.flushall()
        yield client


def _waits(client: redis.Redis, backend: str, count: int, at: float | None = None) -> None:
    """So many generations of a backend wait for their verdict."""
    for n in range(count):
        id = f"{backend}-{n}"
        client.zadd(waiting_key(backend), {id: time.time() if at is None else at})


def test_a_backend_that_is_taken_out_is_told_of_until_nothing_of_it_waits(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_IDLE_SECONDS", -1.0)
    metrics = Metrics()
    backlog = room.Backlog(client, settings_for("http://127.0.0.1:9", "http://127.0.0.1:10"), metrics)

    def told() -> dict[str, object]:
        backlog.refresh()
        (family,) = [each for each in metrics.read(private=True) if each.name == "countersign.backlog"]
        return {backend: count for (backend,), count in family.points.items()}

    _waits(client, "b2", 3)
    assert told() == {"b1": 0, "b2": 3}
    backlog.renew(settings_for("http://127.0.0.1:9"))
    assert told() == {"b1": 0, "b2": 3}
    client.delete(waiting_key("b2"))
    assert told() == {"b1": 0, "b2": 0}
    assert told() == {"b1": 0}


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
            recorder.finished(replace(new_generation(id), backend=f"b{number}"), lambda id=id: new_evidence(id), 1)  # type: ignore[misc]
    recorder.stop(60)
    shed = Counter(backend for id, backend in ids.items() if client.exists(verdict_key(id)))
    page = metrics.page().decode()
    for backend, count in shed.items():
        assert f'countersign_unrecorded_total{{backend="{backend}",reason="backlog"}} {float(count)}' in page
    for id, backend in ids.items():
        if client.exists(verdict_key(id)):
            assert reasons_of(client, id) == ["backlog"]
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
    return [replace(new_evidence(id)[0], claim_ids=ids, claim_logprobs=claim, output_ids=ids[:, 0].copy())]


def _bytes_waiting(client: redis.Redis, backend: str = "b1") -> int:
    return int(client.get(waiting_bytes_key(backend)) or 0)


def test_bytes_are_counted_until_the_verdict(valkey: Valkey, client: redis.Redis) -> None:
    recorder = new_recorder(valkey)
    recorder.start()
    ids = [f"{n:032x}" for n in range(3)]
    for id in ids:
        recorder.finished(new_generation(id), lambda id=id: _big(id, 10), 1)  # type: ignore[misc]
    recorder.stop()
    sizes = [client.strlen(evidence_key(id)) for id in ids]
    assert _bytes_waiting(client) == sum(sizes)
    add_waiting(client, ids[0], "b1", 1000)
    add_waiting(client, "unknown", "b1", 1000)
    assert _bytes_waiting(client) == sum(sizes) + 1000
    again = new_recorder(valkey)
    again.start()
    for id in (ids[0], ids[0], ids[1]):
        again.unchecked(new_generation(id), "no_answer")
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
        recorder.finished(new_generation(id), lambda id=id: _big(id), 1)  # type: ignore[misc]
    huge = f"{99:032x}"
    recorder.finished(new_generation(huge), lambda: _big(huge, 15_000), 1)
    recorder.stop(60)
    shed = [id for id in [*ids, huge] if client.exists(verdict_key(id))]
    assert huge in shed
    assert all(reasons_of(client, id) == ["backlog"] and not client.exists(evidence_key(id)) for id in shed)
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
    recorder, outage = new_recorder(valkey), Outage()
    recorder._outage = outage
    recorder.start()
    used = int(client.info("memory")["used_memory"])
    client.config_set("maxmemory", used + 2_500_000)
    try:
        ids = [f"{n:032x}" for n in range(10)]
        for id in ids:
            recorder.finished(new_generation(id), lambda id=id: _big(id), 1)  # type: ignore[misc]
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
                assert reasons_of(client, id) == ["backlog"]
        # Workers can take what waits, and store verdicts, which makes room.
        queue = FairQueue(VERIFY_QUEUE, connection=client)
        assert sorted(queue.take(100)) == kept
        assert not outage.down
    finally:
        client.config_set("maxmemory", 0)
    recorder.stop()
