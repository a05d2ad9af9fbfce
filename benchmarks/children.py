"""Processes that a benchmark starts, watches and ends, each with a log of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from policies.errors import CountersignError


class Children:
    """By name; logs are `NAME.log` in the folder. Nothing of the user's own `COUNTERSIGN_…` reaches them."""

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._environ = dict(environ or {})
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, words: Sequence[str], *, piped: bool = False) -> subprocess.Popen[bytes]:
        """Start one; `piped` leaves its standard output to the caller."""
        environ = {key: value for key, value in os.environ.items() if not key.startswith("COUNTERSIGN_")}
        # A session of its own: Ctrl-C reaches us alone, and we end the children in order.
        with open(self._folder / f"{name}.log", "ab") as log:
            self._running[name] = subprocess.Popen(
                list(words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else log,
                stderr=log,
                env=environ | self._environ,
                start_new_session=True,
            )
        return self._running[name]

    def port(self, name: str, words: Sequence[str]) -> int:
        """Start one that says its port in its first line. Raises CountersignError when it says nothing."""
        child = self.start(name, words, piped=True)
        assert child.stdout is not None
        line = child.stdout.readline().decode().strip()
        if not line:
            raise CountersignError(f"{name} did not start\n{self.tail(name)}")
        return int(line)

    def pid(self, name: str) -> int:
        """Process id. Raises KeyError."""
        return self._running[name].pid

    def check(self) -> None:
        """Raises CountersignError when one has ended."""
        for name, child in self._running.items():
            if child.poll() is not None:
                raise CountersignError(f"{name} ended with code {child.returncode}\n{self.tail(name)}")

    def wait(self, name: str, ready: Callable[[], bool], seconds: float) -> None:
        """Until it is ready. Raises CountersignError when that takes longer, or anybody ends meanwhile."""
        deadline = time.monotonic() + seconds
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise CountersignError(f"{name} was not ready within {seconds:.0f} s\n{self.tail(name)}")
            time.sleep(0.1)

    def kill(self, name: str) -> None:
        """Kill one, which is then none of ours any more."""
        child = self._running.pop(name)
        child.kill()
        child.wait()

    def tail(self, name: str) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError):
            return "\n".join((self._folder / f"{name}.log").read_text(errors="replace").splitlines()[-20:])
        return ""

    def stop(self) -> None:
        """End every one, last started first."""
        for child in reversed(self._running.values()):
            child.terminate()
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()
        self._running.clear()


def counted(url: str, metric: str) -> float:
    """The sum of a counter over its labels, as the proxy at this address tells it."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metric))
