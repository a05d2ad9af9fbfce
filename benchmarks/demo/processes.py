"""The demo's child processes: started with a log file each, watched, and all ended with the demo."""

from __future__ import annotations

import collections
import itertools
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

from benchmarks.demo import watchdog
from policies.errors import CountersignError

_CLAIMS = 64
_claims: collections.deque[int] = collections.deque()
"""Descriptors of the sockets that claim ports, which no child inherits."""


class ChildError(CountersignError):
    """A child process ended or never became ready; the message ends with its last lines."""


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """One child process, the leader of its own session."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def last_lines(self, count: int = 12) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-count:]
        return "\n".join(f"  {line[:400]}" for line in lines)


class Children:
    """Starts processes and ends them all, with whatever they started, when the block is left.

    A watchdog does the same if this process is killed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[Child] = []

    def __enter__(self) -> Children:
        command = [sys.executable, "-S", "-E", str(Path(watchdog.__file__))]
        self._watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop(*self.running)
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        self._watchdog.wait()

    def start(self, name: str, command: Sequence[str], environ: Mapping[str, str] | None = None) -> Child:
        """Start one process; its output goes to `NAME.log` in the folder."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_inherited() | dict(environ or {}),
                start_new_session=True,
            )
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.write(f"{process.pid}\n".encode())
        self._watchdog.stdin.flush()
        child = Child(name, process, log)
        self.running.append(child)
        return child

    def stop(self, *children: Child) -> None:
        """End these children and whatever they started."""
        watchdog.end([child.process.pid for child in children])
        for child in children:
            child.process.wait()
            self.running.remove(child)

    def finish(self, child: Child, patience: float, tick: Callable[[str], None], doing: Callable[[str], str]) -> None:
        """Wait until this child has ended well, calling `tick` with what `doing` makes of its log so far.

        Raises:
            ChildError: it or another child failed, or `doing` made the same of it for `patience` seconds.
        """
        deadline, before = time.monotonic() + patience, ""
        while child.process.poll() != 0:
            self.check(passing=child)
            now = doing(child.log.read_text(errors="replace"))
            if now != before:
                deadline, before = time.monotonic() + patience, now
            elif time.monotonic() > deadline:
                raise ChildError(f"{child.name} got no further for {patience:.0f} s; see {child.log}")
            tick(now)
            time.sleep(0.5)
        self.stop(child)

    def check(self, passing: Child | None = None) -> None:
        """Raise ChildError when a child has ended by itself; only `passing` may, with exit code 0."""
        for child in self.running:
            code = child.process.poll()
            if code is not None and not (child is passing and code == 0):
                raise ChildError(
                    f"{child.name} ended with exit code {code}; the end of {child.log}:\n{child.last_lines()}"
                )

    def wait(self, ready: Mapping[str, Callable[[], bool]], patience: float, tick: Callable[[str], None]) -> None:
        """Wait until every condition holds, calling `tick` with the names still missing about once a second.

        Raises:
            ChildError: a child ended, or none wrote anything for `patience` seconds: a slow machine takes its time.
        """
        missing, said = dict(ready), self._said
        deadline = time.monotonic() + patience
        while missing:
            self.check()
            missing = {name: condition for name, condition in missing.items() if not condition()}
            if not missing:
                return
            if (now := self._said) != said:
                said, deadline = now, time.monotonic() + patience
            elif time.monotonic() > deadline:
                logs = ", ".join(str(child.log) for child in self.running)
                raise ChildError(f"{', '.join(missing)} not ready after {patience:.0f} s without a word; see {logs}")
            tick(", ".join(missing))
            time.sleep(0.5)

    @property
    def _said(self) -> int:
        """Bytes that children wrote so far."""
        return sum(child.log.stat().st_size for child in self.running)


def _inherited() -> dict[str, str]:
    # A setting meant for the user's own proxy must not change these.
    return {name: value for name, value in os.environ.items() if not name.startswith("COUNTERSIGN_")}


def answers(url: str) -> Callable[[], bool]:
    """A condition: GET `url` gives 200."""

    def condition() -> bool:
        try:
            return httpx.get(url, timeout=5.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    return condition


def free_ports(count: int) -> list[int]:
    """Loopback ports nobody listens on right now, and that no other process is given by this function in the seconds
    until its server listens.

    From below the range that systems give to outgoing connections, one of which could take a port meanwhile.
    """
    candidates = random.sample(range(20_000, 32_000), k=1000)
    found = list(itertools.islice((port for port in candidates if not port_in_use(port) and _claimed(port)), count))
    if len(found) < count:
        raise ChildError("no free ports between 20000 and 32000 on this machine")
    return found


def _claimed(port: int) -> bool:
    """Claim a port, which is to say its UDP namesake, that nobody else wants: until this process ends, or has claimed
    many others. False when somebody else has."""
    with socket.socket(type=socket.SOCK_DGRAM) as claim:
        try:
            claim.bind(("127.0.0.1", port))
        except OSError:
            return False
        _claims.append(claim.detach())
    if len(_claims) > _CLAIMS:
        os.close(_claims.popleft())
    return True


def port_in_use(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could not listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False
