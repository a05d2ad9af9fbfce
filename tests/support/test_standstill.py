"""What fails while the machine stands still is run again; what fails otherwise is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import pytest
from tests.support.standstill import Again

def pytest_configure(config):
    config.pluginmanager.register(Again())

RUNS = []

@pytest.fixture
def shared():
    return RUNS

@pytest.fixture
def fragile(shared):
    shared.append(1)
    if len(shared) == FAILS_IN_SETUP:
        stand_still()
        raise OSError("late")
    return shared

def stand_still():
    import os, subprocess, time
    stop = f"sleep 0.1; kill -STOP {os.getpid()}; sleep 0.6; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", stop])
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        time.sleep(0.01)
"""
STILL = """
from conftest import stand_still

def test_it(fragile):
    stand_still()
    assert len(fragile) > 1, "too late"
"""


def _run(folder: Path, text: str, fails_in_setup: int = 0) -> str:
    (folder / "conftest.py").write_text(CONFTEST.replace("FAILS_IN_SETUP", str(fails_in_setup)))
    (folder / "test_one.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout


@pytest.mark.parametrize("fails_in_setup", [0, 1])
def test_a_test_that_was_late_is_run_again(tmp_path: Path, fails_in_setup: int) -> None:
    said = _run(tmp_path, STILL, fails_in_setup)
    assert "1 passed" in said, said
    assert "run again, because the machine stood still meanwhile: 1" in said


def test_what_is_wrong_fails_every_time(tmp_path: Path) -> None:
    said = _run(tmp_path, STILL.replace("> 1", "> 9"))
    assert "1 failed" in said, said


def test_what_fails_on_a_machine_that_goes_on_is_run_once(tmp_path: Path) -> None:
    said = _run(tmp_path, "def test_it(shared):\n    shared.append(1)\n    assert len(shared) > 1\n")
    assert "1 failed" in said, said
