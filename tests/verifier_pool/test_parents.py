"""Who was started by another process ends with it, whatever Redis does meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from redis import Redis

from tests.support.waiting import PATIENCE
from tests.verifier_pool import rig
from verifier_pool import parents, worker
from verifier_pool.parents import stop_with, wait_for_end

WEBHOOK = {"url": "https://example.com/hook", "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}


def config(folder: Path, url: str) -> str:
    path = folder / "countersign.yaml"
    path.write_text(yaml.safe_dump({"redis_url": url, "webhook": WEBHOOK}))
    return str(path)


@pytest.mark.parametrize("role", [["--only", "verify"], ["--only", "webhooks"], []])
@pytest.mark.parametrize("away", [False, True])
def test_a_worker_whose_parent_is_gone_ends(
    redis: Redis, valkey_url: str, tmp_path: Path, role: Sequence[str], away: bool
) -> None:
    path = config(tmp_path, f"unix://{tmp_path}/none.sock" if away else valkey_url)
    # Process 1 did not start us.
    assert worker.main(["--config", path, "--parent", "1", *role]) == 0


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks Linux who the children are")
def test_a_killed_supervisor_takes_its_processes_along_while_redis_is_away(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "countersign", "worker", "--only", "verify", "--processes", "2"]
    with (tmp_path / "log").open("w") as log:
        command += ["--config", config(tmp_path, f"unix://{tmp_path}/none.sock")]
        supervisor = subprocess.Popen(command, cwd=rig.ROOT, stderr=log)
    pids: list[int] = []
    try:
        rig.wait_until(lambda: (tmp_path / "log").read_text().count("does not answer") >= 4)
        pids = children_of(supervisor.pid)
        assert len(pids) == 2
        supervisor.kill()
        supervisor.wait()
        rig.wait_until(lambda: not any(map(runs, pids)))
    finally:
        supervisor.kill()
        supervisor.wait()
        for pid in filter(runs, pids):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("pidfd", [False, True])
def test_the_end_of_a_process_is_noticed(monkeypatch: pytest.MonkeyPatch, pidfd: bool) -> None:
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
        monkeypatch.setattr(parents, "POLL_SECONDS", 0.01)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    waiting = threading.Thread(target=wait_for_end, args=(process.pid,), daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    process.kill()
    process.wait()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    wait_for_end(process.pid)


def test_a_parent_that_lives_stops_nobody() -> None:
    stop = threading.Event()
    stop_with(os.getppid(), stop)
    assert not stop.wait(0.3)
    stop_with(os.getpid(), stop)
    assert stop.wait(PATIENCE)
