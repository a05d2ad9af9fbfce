"""What fails while the machine stands still is run again; what fails otherwise is not."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.standstill import Lost, Watch

CONFTEST = """
import pytest
from tests.support.standstill import Again

def pytest_configure(config):
    config.pluginmanager.register(Again(), "countersign-again")

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
    stop = f"sleep 0.1; kill -STOP {os.getpid()}; sleep 1; kill -CONT {os.getpid()}"
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
KEPT = """
import pytest
from conftest import RUNS, stand_still

@pytest.fixture(scope="module")
def kept():
    RUNS.append(1)
    return len(RUNS)

def test_it(kept):
    stand_still()
    assert kept > 1, "too late"

def test_another(kept):
    assert kept > 1
"""
AHEAD = """
import time
import pytest
from conftest import RUNS, stand_still
from tests.e2e.ahead import ahead

@pytest.fixture(scope="module")
def found(request):
    over = []

    def work(at):
        RUNS.append(at)
        if at == 1 and not over:
            stand_still()
            over.append(1)
            raise OSError("late")
        while not over:
            time.sleep(0.01)
        return at

    with ahead(request, "test_it", work) as found:
        yield found

@pytest.mark.parametrize("at", [0, 1, 2])
def test_it(found, request, at):
    time.sleep(0.1)
    assert found.of(request.node) == at

def test_how_often():
    assert sorted(RUNS) == [0, 1, 1, 2]
"""


def _run(folder: Path, text: str, fails_in_setup: int = 0, more: tuple[str, ...] = ()) -> str:
    (folder / "conftest.py").write_text(CONFTEST.replace("FAILS_IN_SETUP", str(fails_in_setup)))
    (folder / "test_one.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    command += more
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout


@pytest.mark.parametrize(
    ("fails_in_setup", "more"), [(0, ()), (1, ()), (0, ("-n", "1"))], ids=["in its call", "in its setup", "in a worker"]
)
def test_a_test_that_was_late_is_run_again_and_told(tmp_path: Path, fails_in_setup: int, more: tuple[str, ...]) -> None:
    said = _run(tmp_path, STILL, fails_in_setup, more)
    assert "1 passed" in said, said
    assert "run again, because the machine stood still meanwhile: 1" in said
    assert "test_one.py::test_it: " in said, "and what it said"


def test_what_a_modules_tests_share_is_made_anew_in_the_end(tmp_path: Path) -> None:
    said = _run(tmp_path, KEPT)
    assert "2 passed" in said, said
    assert "run again, because the machine stood still meanwhile: 1" in said


def test_what_was_late_before_its_turn_is_done_again(tmp_path: Path) -> None:
    said = _run(tmp_path, AHEAD)
    assert "4 passed" in said, said
    assert "run again, because the machine stood still meanwhile: 1" in said
    assert "test_one.py::test_it[1]: " in said


def test_what_is_wrong_fails_every_time_and_is_told(tmp_path: Path) -> None:
    said = _run(tmp_path, STILL.replace("> 1", "> 9"))
    assert "1 failed" in said, said
    assert "run again, because the machine stood still meanwhile: 1" in said


def test_what_fails_on_a_machine_that_goes_on_is_run_once(tmp_path: Path) -> None:
    said = _run(tmp_path, "def test_it(shared):\n    shared.append(1)\n    assert len(shared) > 1\n")
    assert "1 failed" in said, said
    assert "run again" not in said


def test_code_that_lets_no_thread_run_is_no_excuse() -> None:
    began = time.process_time()
    with Watch().looking() as lost:
        sum(range(20_000_000))
        used = time.process_time() - began
    assert lost.at_once <= lost.length - used + 0.1


@pytest.mark.parametrize(
    ("lost", "excuses"),
    [
        (Lost(length=1.0, at_once=0.4, waited=0.4), False),
        (Lost(length=60.0, at_once=0.5), True),
        (Lost(length=1.0, waited=0.5), True),
        (Lost(length=60.0, at_once=0.4, waited=6.0), False),
        (Lost(length=60.0, waited=30.0), True),
    ],
)
def test_little_is_forgiven(lost: Lost, excuses: bool) -> None:
    assert lost.excuses() == excuses
