"""What goes wrong beside a response costs it no verdict, and what goes wrong with one costs no other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import redis

from policies import codec
from policies.errors import EvidenceError
from policies.evidence import Evidence
from proxy.recorder import Recorder
from tests.proxy.recording import new_evidence, new_generation, new_recorder, reasons_of
from tests.support.valkey import Valkey
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import VERIFY_QUEUE, evidence_key, verdict_key

IDS = [f"{number:032x}" for number in range(20)]


@pytest.fixture
def client(valkey: Valkey) -> Iterator[redis.Redis]:
    with valkey.client() as client:
        client.flushall()
        yield client


def broken(*_: Any, **__: Any) -> None:
    raise AttributeError("no such thing")


def record(recorder: Recorder) -> None:
    for id in IDS:
        recorder.finished(new_generation(id), lambda id=id: new_evidence(id), 1)  # type: ignore[misc]
    recorder.start()
    recorder.stop()


def check_queued(client: redis.Redis, ids: list[str]) -> None:
    assert client.exists(*map(evidence_key, ids)) == len(ids)
    assert not client.exists(*map(verdict_key, ids))
    assert set(ids) <= set(FairQueue(VERIFY_QUEUE, connection=client).get_job_ids())


class Broken:
    past = counted = add = staticmethod(broken)


def test_broken_traces_and_meters_cost_no_verdict(
    valkey: Valkey, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = new_recorder(valkey)
    monkeypatch.setattr(recorder, "_tracing", Broken())
    monkeypatch.setattr(recorder._metrics, "counted", broken)
    monkeypatch.setattr(recorder._metrics, "unrecorded", Broken())
    recorder.unchecked(new_generation("f" * 32), "no_answer")
    record(recorder)
    check_queued(client, IDS)
    assert reasons_of(client, "f" * 32) == ["no_answer"]


def test_one_that_cannot_be_written_takes_no_other_along(
    valkey: Valkey, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = new_recorder(valkey)
    queue, odd = recorder._queue, IDS[7]

    def written(packed: Any, pipeline: Any) -> None:
        if packed.item.generation.id == odd:
            raise TypeError("cannot be written")
        queue(packed, pipeline)

    monkeypatch.setattr(recorder, "_queue", written)
    recorder.start()
    for id in IDS:
        recorder.finished(new_generation(id), lambda id=id: new_evidence(id), 1)  # type: ignore[misc]
    assert reasons_of(client, odd) == ["internal_error"]
    recorder.stop()
    check_queued(client, [id for id in IDS if id != odd])


@pytest.mark.parametrize("error", [EvidenceError, MemoryError, TypeError])
def test_evidence_that_cannot_be_packed_counts_as_its_backends(
    valkey: Valkey, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """What a backend said keeps nobody from recording that it said it."""
    real, odd = codec.pack, IDS[7]

    def pack(choices: Sequence[Evidence]) -> bytes:
        if choices[0].id == odd and not choices[0].faults:
            raise error("cannot be packed")
        return real(choices)

    monkeypatch.setattr(codec, "pack", pack)
    record(new_recorder(valkey))
    check_queued(client, IDS)
    found = {id: codec.unpack(cast(bytes, client.get(evidence_key(id)))) for id in IDS}
    assert [id for id in IDS if "unreadable" in found[id][0].faults] == [odd]
    assert [choice.index for choice in found[odd]] == [choice.index for choice in found[IDS[0]]]
