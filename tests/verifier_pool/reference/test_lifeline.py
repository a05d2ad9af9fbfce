"""An engine's processes end with the process that started them, which is killed here, not asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from policies._sections import PREFIX
from tests.support.waiting import PATIENCE
from verifier_pool.reference import lifeline

WORKER = "import time, verifier_pool.reference.lifeline; print(__import__('os').getpid(), flush=True); time.sleep(60)"
CORE = (
    "import os, subprocess, sys, time; print(os.getpid(), flush=True); "
    f"subprocess.Popen([sys.executable, '-c', {WORKER!r}]); time.sleep(60)"
)
OWNER = (
    "import os, subprocess, sys, time; os.environ['VERIFIER_ENGINE_OWNER'] = str(os.getpid()); "
    "subprocess.Popen([sys.executable, '-c', {!r}]); time.sleep(60)"
)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, seconds: float = PATIENCE) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


@pytest.mark.parametrize(("code", "count"), [(WORKER, 1), (CORE, 2)])
def test_a_killed_owner_takes_its_engine_along(code: str, count: int) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER.format(code)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        pids = [int(owner.stdout.readline()) for _ in range(count)]
        # The one that is loaded with it has to have begun to watch.
        time.sleep(0.2)
        assert all(alive(pid) for pid in pids)
        owner.send_signal(signal.SIGKILL)
        owner.wait(PATIENCE)
        assert all(gone(pid) for pid in pids)
    finally:
        owner.kill()
        owner.communicate()


def test_an_owner_that_lives_keeps_it() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"VERIFIER_ENGINE_OWNER": str(os.getpid())},
    )
    try:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        assert not gone(pid, 0.7)
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("owner", ["", "x", "999999999", "1"])
def test_nobody_elses_end_matters(owner: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"VERIFIER_ENGINE_OWNER": owner},
    )
    try:
        assert child.stdout is not None
        assert int(child.stdout.readline()) == child.pid
        assert not gone(child.pid, 0.5)
    finally:
        child.kill()
        child.communicate()


def test_the_owners_variable_is_no_setting() -> None:
    # It is inherited by every process that a worker starts, and those read settings from their environment.
    assert not lifeline.OWNER.startswith(PREFIX)
