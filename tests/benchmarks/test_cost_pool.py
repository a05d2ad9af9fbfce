"""The pool's phases on real processes and a real Valkey; the toy takes the engine's place."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cost import report
from benchmarks.cost.arms import BACKEND, MODEL
from benchmarks.cost.feeding import Fed, Feeder, words
from benchmarks.cost.pool import CAPACITY, LATENCY, LEVELS, QUEUEING, Phases, Supply
from benchmarks.cost.pool_run import _known, _waiting
from benchmarks.cost.rows import POOL, Rows, read
from benchmarks.cost.stack import ROLES, Pool
from benchmarks.harness.progress import Bar, Clock
from benchmarks.harness.usage import Gpu, cpu_seconds, descendants
from policies.errors import CountersignError, StoreUnavailable
from policies.evidence import Evidence
from tests.benchmarks.cost_toy import prompt
from tests.verifier_pool.toy import answer

SETTINGS = {
    "models": {MODEL: {"vocab_size": 64, "reference": {"kind": "vllm_http", "url": "http://127.0.0.1:9"}}},
    "backends": [{"name": BACKEND, "url": "http://127.0.0.1:9", "model": MODEL, "runtime": "vllm-0.32-v1-cpu"}],
    "audit": {"rate": 1.0, "full": 0.0},
    "verification": {"max_backlog": 100_000},
}
WORKER = (sys.executable, "-m", "tests.benchmarks.cost_toy")


def _answer(length: int, number: int = 0) -> Evidence:
    return answer(prompt(8 + number), length, backend=BACKEND, model=MODEL, endpoint="completions", request=b"")


SUPPLY = Supply("3x8/16", tuple(_answer(16, number) for number in range(3)))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """One for the whole file: the last two tests change and stop it."""
    with Pool(SETTINGS, workers=2, command=WORKER) as started:
        yield started


@asynccontextmanager
async def phases_of(pool: Pool, path: Path) -> AsyncIterator[Phases]:
    async with Feeder(pool) as feeder:
        with Gpu() as gpu:
            yield Phases(pool, feeder, gpu, Rows(path), Clock(), Bar("cost", io.StringIO()), 1.0, 0.0, 7)


async def test_one_at_a_time_ends_with_a_verdict_each(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "pool.jsonl"
    async with phases_of(pool, path) as phases:
        await phases.latency([((8, 16), _answer(16)), ((8, 20), _answer(20))], 2)
    rows = read(path)
    assert [(row["phase"], row["input_len"], row["output_len"], row["iter"]) for row in rows] == [
        (LATENCY, 8, 16, 0),
        (LATENCY, 8, 16, 1),
        (LATENCY, 8, 20, 0),
        (LATENCY, 8, 20, 1),
    ]
    for row in rows:
        assert row["error"] == ""
        assert 0 < row["end_to_end_s"] < 20
        assert row["verdict"] == "inconclusive"  # there is no profile


async def test_flat_out_every_generation_is_verified_and_counted(pool: Pool, tmp_path: Path) -> None:
    async with phases_of(pool, tmp_path / "pool.jsonl") as phases:
        row = await phases.capacity(SUPPLY, 40)
    assert read(tmp_path / "pool.jsonl") == [row]
    assert (row["phase"], row["generations"], row["decided"], row["error"]) == (CAPACITY, 40, 40, "")
    lengths = [24, 25, 26]
    assert row["tokens"] == sum(lengths[number % 3] for number in range(40))
    assert row["per_s"] == pytest.approx(40 / row["seconds"])
    assert sum(row["verdicts"].values()) == 40
    assert set(row["cpu_s"]) == set(ROLES)
    assert row["cpu_s"]["verify"] > 0
    assert row["cpu_s"]["replay"] > 0
    assert row["latency_s"]["p50"] <= row["latency_s"]["max"] <= row["seconds"] + 0.5


async def test_below_capacity_arrivals_do_not_wait_for_the_pool(pool: Pool, tmp_path: Path) -> None:
    async with phases_of(pool, tmp_path / "pool.jsonl") as phases:
        row = await phases.queueing(SUPPLY, 20.0, 0.5)
    assert (row["phase"], row["level"], row["rate"], row["error"]) == (QUEUEING, 0.5, 10.0, "")
    assert row["generations"] == row["decided"] == 10
    assert row["latency_s"]["n"] == 9, "the first tenth fills the queue"
    assert row["alone_s"] > 0
    assert 0 <= row["queued_s"]["p50"] <= row["latency_s"]["p50"]


@pytest.mark.parametrize("phase", [LATENCY, CAPACITY, QUEUEING])
async def test_a_phase_that_breaks_off_is_a_row_and_is_run_again(
    phase: str, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, shown = tmp_path / POOL, io.StringIO()
    async with phases_of(pool, path) as phases:
        phases.bar, phases.waiting = Bar("cost", shown), 3

        async def gone(evidence: Evidence) -> Fed:
            raise StoreUnavailable("no store")

        monkeypatch.setattr(phases.feeder, "feed", gone)
        run: dict[str, Coroutine[Any, Any, Any]] = {
            LATENCY: phases.latency([((8, 16), _answer(16))], 1),
            CAPACITY: phases.capacity(SUPPLY, 3),
            QUEUEING: phases.queueing(SUPPLY, 20.0, 0.5),
        }
        with pytest.raises(StoreUnavailable):
            await run.pop(phase)
        for other in run.values():
            other.close()
    (row,) = read(path)
    assert (row["phase"], row["error"]) == (phase, "StoreUnavailable: no store")
    assert not _known(Rows(path))
    assert _waiting(Rows(path), [SUPPLY]) == len(LEVELS) + 2
    text, failed = report.write(tmp_path)
    assert failed == 1
    assert "StoreUnavailable: no store" in text
    if phase != LATENCY:
        assert "about 3 s left" in shown.getvalue(), "three phases of a second each"


async def test_what_gets_no_verdict_is_missing(pool: Pool) -> None:
    async with Feeder(pool) as feeder:
        fed = await feeder.feed(_answer(16))
        feeder._open["never"] = lost = Fed("never", 1, time.monotonic())
        await feeder.settle(1.0)
        await feeder.look_up([fed, lost])
    assert fed.decided is not None
    assert words([fed, lost]) == {"missing": 1, fed.verdict: 1}


def test_what_is_left_out_is_said_with_its_reason() -> None:
    fed = [Fed("a", 1, 0.0, 1.0, "unverified", ("backlog",)), Fed("b", 1, 0.0, 2.0, "pass")]
    assert words(fed) == {"unverified: backlog": 1, "pass": 1}
    assert fed[1].latency == 2.0
    assert replace(fed[1], decided=None).latency is None


def test_a_worker_that_does_not_start_says_why() -> None:
    broken = SETTINGS | {"models": {MODEL: {"vocab_size": 64, "profile": "/nowhere/profile.json"}}}
    with pytest.raises(CountersignError, match=r"ended with code 3") as failed, Pool(broken, workers=1):
        pass
    assert "profile" in str(failed.value) or "reference" in str(failed.value)


async def test_other_settings_reach_the_workers(pool: Pool, tmp_path: Path) -> None:
    pool.reconfigure({"audit": {"rate": 0.000001, "full": 0.0}})
    async with Feeder(pool) as feeder:
        fed = [await feeder.feed(_answer(16)) for _ in range(3)]
        await feeder.settle(20)
        await feeder.look_up(fed)
    # No replay, so nothing that only a replay can say.
    assert words(fed) == {"unaudited": 3}


def test_everything_ends_with_the_pool(pool: Pool) -> None:
    running = [child.pid for child in pool._children.values()]
    running += [each for pid in running for each in descendants(pid)]
    assert len(running) >= 4
    assert all(cpu_seconds(pid) > 0 for pid in running)
    pool.stop()
    assert not [pid for pid in running if Path(f"/proc/{pid}").exists()]
    assert not pool.folder.exists()
    assert cpu_seconds(running[0]) == 0.0
