"""Three proxies, four CPU workers and two references share one external Redis, and leave nothing behind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis

from benchmarks.chaos.stage import Scene, Stage
from verifier_pool import RQ_PREFIX
from verifier_pool.link.queue import VERIFY_QUEUE
from verifier_pool.replays import queue_of

pytestmark = pytest.mark.alone
MODELS = ("toy", "toy-1")
GENERATION = re.compile(r"[0-9a-f]{32}")
GROWTH = 24 * 2**20
"""Bytes that a process may grow after its first third: buffers, and what an allocator keeps."""


class Seen:
    """What Redis holds when all has settled and every process still runs."""

    jobs: dict[str, list[int]]
    lasting: list[str]
    memory: int

    def __call__(self, stage: Stage) -> None:
        with stage.valkey.client() as redis:
            self.jobs = _jobs_done(redis)
            self.lasting = [key.decode() for key in redis.scan_iter(count=1000) if redis.ttl(key) == -1]
            self.memory = redis.info("memory")["used_memory"]


def _jobs_done(redis: Redis) -> dict[str, list[int]]:
    """Jobs that each worker did, by its queue."""
    found: dict[str, list[int]] = {}
    for key in cast("set[bytes]", redis.smembers(f"{RQ_PREFIX}:workers")):
        worker = cast("Mapping[bytes, bytes]", redis.hgetall(key))
        done = int(worker.get(b"successful_job_count", b"0"))
        found.setdefault(worker[b"queues"].decode(), []).append(done)
    return found


async def test_many_processes_share_the_work_and_leave_nothing_behind(tmp_path: Path) -> None:
    scene = Scene(
        proxies=3,
        workers=4,
        references=1,
        models=MODELS,
        clients=12,
        tenants=2,
        kills=0,
        seconds=20.0,
        settle=240.0,
        pause=0.2,
    )
    stage, seen = Stage(scene, tmp_path, print), Seen()
    outcome = await stage.run(seen)
    ledger = outcome.ledger
    assert (ledger.lost, ledger.duplicates, ledger.wrong, outcome.exits) == ([], [], [], {})
    assert outcome.settled_after is not None
    assert ledger.asked >= 100
    # A client may leave before its request went up; then it has a record all the same, or never began.
    assert ledger.sent <= ledger.accepted == ledger.verdicts.total() <= ledger.asked
    assert {"pass", "reject", "unaudited", "inconclusive"} <= set(ledger.verdicts)
    _shared(ledger.rows, seen.jobs)
    assert [key for key in seen.lasting if GENERATION.search(key)] == []
    assert len(seen.lasting) < 50
    assert seen.memory < 64 * 2**20
    for life, bytes_held in stage.memory.items():
        assert max(bytes_held) - bytes_held[len(bytes_held) // 3] < GROWTH, life


def _shared(rows: list[dict[str, Any]], jobs: dict[str, list[int]]) -> None:
    proxies, models = Counter(row["proxy"] for row in rows), Counter(row["model"] for row in rows)
    assert len(proxies) == 3
    assert set(models) == set(MODELS)
    assert min(proxies.values()) > len(rows) / 6
    verified = jobs.pop(VERIFY_QUEUE)
    assert len(verified) == 4
    assert min(verified) > sum(verified) / 20
    # Each model has a queue of its own, and its replays went through no other.
    assert set(jobs) == {queue_of(model) for model in MODELS}
    for model in MODELS:
        audited = sum(bool(row["audited"]) for row in rows if row["model"] == model)
        # An audited answer whose client left before its first token has nothing to replay; doubt adds replays.
        assert 0.8 * audited <= sum(jobs[queue_of(model)]) <= models[model]
