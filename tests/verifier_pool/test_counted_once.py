"""Verdicts are counted once each, whichever worker is killed when; what else a worker counts, its parent keeps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis

from benchmarks.demo.processes import free_ports
from policies import tally
from policies.settings import Settings
from tests.support.waiting import PATIENCE
from tests.verifier_pool import rig
from tests.verifier_pool.crashes import survives
from tests.verifier_pool.toy import answer, settings
from verifier_pool import RQ_PREFIX, rq_job
from verifier_pool.link.queue import VERIFY_QUEUE, tally_key
from verifier_pool.loop import Loop

TOKEN = "t" * 20


def counted(redis: Redis) -> tally.Names:
    found = cast("dict[bytes, bytes]", redis.hgetall(tally_key("honest")))
    return tally.read((name.decode(), int(count)) for name, count in found.items())


def test_a_verdict_is_counted_once_wherever_its_worker_is_killed(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies before every command that it sends in turn, and another one finds what it left."""
    rig.no_waits(monkeypatch)
    monkeypatch.setattr(Loop, "patience", 0)
    monkeypatch.setattr(rq_job, "STRANDED_SECONDS", -1)
    rules = settings(valkey_url)
    lives, command, ended = 0, 0, False
    while not ended:
        redis.flushall()
        evidence = answer()
        rig.submit(redis, rules, [evidence])
        ended = survives(
            lambda: rig.worker(Redis.from_url(valkey_url), rules).serve(burst=True),
            command,
        )
        pool = rig.worker(redis, rules)
        for _ in range(3):
            pool.loop.run_maintenance_tasks()  # type: ignore[no-untyped-call]
            pool.serve(burst=True)
        word = rig.verdict_of(redis, evidence.id)["verdict"]
        found = counted(redis)
        assert found.verdicts == {(word,): 1}, command
        assert sum(found.checks.values()) == 2, command
        command += 1
        lives += 1
    assert lives > 20


@contextmanager
def workers(folder: Path, rules: Settings, count: int, port: int) -> Iterator[subprocess.Popen[bytes]]:
    tree = rules.model_dump(mode="json", exclude_unset=True)
    config = folder / "countersign.yaml"
    config.write_text(yaml.safe_dump(tree | {"metrics": {"port": port}}))
    environ = os.environ | {"COUNTERSIGN_METRICS__TOKEN": TOKEN}
    command = [sys.executable, "-m", "countersign", "worker", "--config", str(config)]
    process = subprocess.Popen([*command, "--only", "verify", "--processes", str(count)], cwd=rig.ROOT, env=environ)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE)


def scraped(port: int) -> dict[str, float]:
    """Sums over all series of each counter."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    page = httpx.get(f"http://127.0.0.1:{port}/metrics", headers=headers, timeout=PATIENCE, trust_env=False).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_counters_go_on_when_workers_are_killed(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    rules, (port,) = settings(valkey_url), free_ports(1)
    here = RQ_PREFIX + ":workers:" + VERIFY_QUEUE

    def decided(count: int) -> bool:
        # Each child tells its parent once a second.
        told = sum(counted(redis).verdicts.values()), scraped(port).get("countersign_verdict_delay_seconds_count", 0)
        assert max(told) <= count
        return told == (count, count)

    def others(than: set[bytes]) -> bool:
        return len(cast("set[bytes]", redis.smembers(here)) - than) == 2

    with workers(tmp_path, rules, 2, port):
        last: dict[str, float] = {}
        gone: set[bytes] = set()
        for total in (20, 40):
            rig.wait_until(partial(others, gone))
            for _ in range(20):
                rig.submit(redis, rules, [answer()])
            rig.wait_until(partial(decided, total))
            now = scraped(port)
            assert all(now[name] >= value for name, value in last.items() if name.endswith(("_total", "_count")))
            assert now["countersign_jobs_total"] == now["countersign_job_delay_seconds_count"] == total
            # One page for the parent and both of its children.
            assert now["countersign_build"] == 1
            last, before = now, cast("set[bytes]", redis.smembers(here)) - gone
            for key in before:
                os.kill(int(redis.hget(key, "pid") or 0), signal.SIGKILL)
            gone |= before
        rig.wait_until(partial(others, gone))
        assert decided(40)
        assert scraped(port)["countersign_jobs_total"] == 40
