"""Child processes: none survives its parent, however the parent goes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.demo import processes, watchdog
from benchmarks.demo.processes import ChildError, Children
from tests.support.waiting import PATIENCE

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
# A child with a grandchild in another process group, as rq and vLLM have them, that ignores SIGTERM.
STUBBORN = [
    sys.executable,
    "-c",
    "import os, signal, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN);'\n"
    "    'print(1, flush=True); time.sleep(600)'], process_group=0, stdout=subprocess.PIPE)\n"
    "child.stdout.readline()\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)",
]
PARENT = """
import sys, time
from pathlib import Path
from benchmarks.demo.processes import Children
folder, command = Path(sys.argv[1]), sys.argv[2:]
with Children(folder) as children:
    child = children.start("stubborn", command)
    print(child.process.pid, flush=True)
    time.sleep(600)
"""


def printed(log: Path, timeout: float = PATIENCE) -> str:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if log.exists() and (text := log.read_text()).strip():
            return text
        time.sleep(0.05)
    raise AssertionError(f"nothing in {log}")


def gone(pid: int, timeout: float = PATIENCE) -> bool:
    deadline = time.monotonic() + timeout
    while watchdog._alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog.end, "__defaults__", (0.5,))


def test_leaving_the_block_ends_the_whole_tree(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("stubborn", STUBBORN)
        grandchild = int(printed(child.log))
        assert watchdog.tree(child.process.pid) == {child.process.pid, grandchild}
    assert gone(child.process.pid)
    assert gone(grandchild)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_survives_the_parent(tmp_path: Path, number: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), *STUBBORN],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    grandchild = int(printed(tmp_path / "stubborn.log"))
    parent.send_signal(number)
    parent.wait(PATIENCE)
    parent.stdout.close()
    assert gone(child)
    assert gone(grandchild)


def test_a_child_that_ends_by_itself_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        children.start("short", [sys.executable, "-c", "print('the reason'); raise SystemExit(7)"])
        with pytest.raises(ChildError, match=r"short ended with exit code 7(.|\n)*the reason"):
            children.wait({"short": lambda: False}, 20, lambda missing: None)


def test_not_ready_in_time(tmp_path: Path) -> None:
    ticks: list[str] = []
    with Children(tmp_path) as children:
        children.start("sleeper", SLEEPER)
        with pytest.raises(ChildError, match=r"b not ready after 1 s without a word; see .*sleeper\.log"):
            children.wait({"a": lambda: True, "b": lambda: False}, 0.6, ticks.append)
    assert set(ticks) == {"b"}


class Clock:
    """Time that passes only while it is slept."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_who_gets_on_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slowly; only who is silent, or says the same, is given up."""
    clock = Clock()
    monkeypatch.setattr(processes, "time", clock)
    with Children(tmp_path) as children:
        child = children.start("slow", SLEEPER)

        def work(_: str) -> None:
            if clock.now % 9 == 0 and clock.now < 90:
                child.log.write_text(child.log.read_text() + "a step\n")

        with pytest.raises(ChildError, match="b not ready after 10 s without a word"):
            children.wait({"b": lambda: False}, 10, work)
        assert 90 < clock.now < 95
        clock.now = 0.0
        with pytest.raises(ChildError, match="slow got no further for 10 s"):
            children.finish(child, 10, work, lambda log: f"{log.count('a step')} steps")
        assert 90 < clock.now < 95


def test_finish_waits_for_one_and_watches_all(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        children.start("sleeper", SLEEPER)
        short = children.start("short", [sys.executable, "-c", "import time; print('at work'); time.sleep(0.7)"])
        ticks: list[str] = []
        children.finish(short, 20, ticks.append, lambda log: f"it said {log.split()[:2]}")
        assert set(ticks) <= {"it said []", "it said ['at', 'work']"}
        children.check()
        failing = children.start("failing", [sys.executable, "-c", "raise SystemExit('no backend')"])
        with pytest.raises(ChildError, match=r"failing ended with exit code 1(.|\n)*no backend"):
            children.finish(failing, 20, lambda line: None, str)


def test_settings_of_the_user_do_not_reach_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTERSIGN_PORT", "1")
    with Children(tmp_path) as children:
        child = children.start("env", [sys.executable, "-c", "import os; print('COUNTERSIGN_PORT' in os.environ)"])
        child.process.wait(PATIENCE)
        assert child.log.read_text().strip() == "False"


def test_stopping_one_leaves_the_others(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        first, second = children.start("first", SLEEPER), children.start("second", SLEEPER)
        children.stop(first)
        children.check()
        assert first.process.poll() is not None
        assert second.process.poll() is None


def test_environment_is_added(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("env", [sys.executable, "-c", "import os; print(os.environ['MARK'])"], {"MARK": "here"})
        child.process.wait(PATIENCE)
        assert child.log.read_text().strip() == "here"


def test_ports() -> None:
    ports = processes.free_ports(4)
    assert len(set(ports)) == 4
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert processes.port_in_use(server.getsockname()[1])
    assert not processes.port_in_use(ports[0])


def test_no_two_processes_are_given_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before anybody listens there."""
    port, other = processes.free_ports(2)
    monkeypatch.setattr("random.sample", lambda population, k: [port, other, *population])
    assert not {port, other} & set(processes.free_ports(2))
    asked = (
        "import random; from benchmarks.demo import processes;"
        f"random.sample = lambda population, k: [{port}, *population]; print(processes.free_ports(1)[0])"
    )
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert int(said.stdout) != port


def test_answers() -> None:
    assert not processes.answers(f"http://127.0.0.1:{processes.free_ports(1)[0]}/health")()


def test_tree_without_children_is_the_process_alone() -> None:
    process = subprocess.Popen(SLEEPER, start_new_session=True)
    try:
        assert watchdog.tree(process.pid) == {process.pid}
    finally:
        watchdog.end([process.pid])
        process.wait()
    assert os.WIFSIGNALED(process.returncode & 0x7F) or process.returncode < 0
