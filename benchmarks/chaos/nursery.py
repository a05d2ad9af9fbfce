"""Starts Python processes in milliseconds: a process that has imported everything forks, and the fork runs `main`.

A proxy takes a second of CPU to import; two hundred deaths in a minute would leave nothing but importing on a small
machine. What runs afterwards is the same: a process of its own, with its own session, signals and log.

`python -m benchmarks.chaos.nursery` reads one JSON object a line from its standard input (`module`, `argv`, `log`),
writes the process id, and later what it ended with. When the input ends, everything it started is killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import orjson

PRELOADED = (
    "countersign",
    "proxy.serve",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.httptools_impl",
    "verifier_pool.worker",
    "verifier_pool.reference.vllm_http",
    "benchmarks.chaos.engine",
    "benchmarks.chaos.upstream",
)
ENVIRON = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""A process with threads cannot be forked safely."""


class Born:
    """A process that the nursery started, with the part of `subprocess.Popen` that the fleet needs."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self._ended = threading.Event()
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._code

    def kill(self) -> None:
        """SIGKILL."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Until it has ended."""
        self._ended.wait()

    def ended(self, code: int) -> None:
        """It ended."""
        self._code = code
        self._ended.set()


class Nursery:
    """A context manager. Whatever it started is gone when the block is left, or this process dies.

    Args:
        environ: for everything it starts, beside this process's own.
        preloaded: modules that are imported before the first fork.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, preloaded: Sequence[str] = PRELOADED) -> None:
        self._preloaded = preloaded
        self._environ = ENVIRON | dict(environ or {})
        self._born: dict[int, Born] = {}
        self._pids: list[int] = []
        self._told = threading.Condition()

    def __enter__(self) -> Nursery:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("COUNTERSIGN_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.chaos.nursery", *self._preloaded],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ | self._environ,
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, name="nursery", daemon=True)
        self._listener.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._listener.join()
        for born in self._born.values():
            born.ended(-signal.SIGKILL)
        self._process.stdout.close()

    def start(self, module: str | None, argv: list[str], log: Path) -> Born:
        """A process that runs `main(argv)` of a module, or the program `argv`.

        Raises:
            RuntimeError: the nursery starts nothing any more.
        """
        assert self._process.stdin is not None
        with self._told:
            self._process.stdin.write(orjson.dumps({"module": module, "argv": argv, "log": str(log)}) + b"\n")
            self._process.stdin.flush()
            if not self._told.wait_for(lambda: self._pids, 30):
                raise RuntimeError("the nursery starts nothing any more")
            pid = self._pids.pop()
            born = self._born[pid] = Born(pid, log)
            return born

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = orjson.loads(line)
            with self._told:
                if "code" not in said:
                    self._pids.append(said["pid"])
                    self._told.notify()
                    continue
                self._told.wait_for(lambda pid=said["pid"]: pid in self._born, 5)  # type: ignore[misc]
                self._born.pop(said["pid"]).ended(said["code"])


def main() -> int:
    """Import the modules that are named, then fork on demand until the input ends."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    alive: set[int] = set()
    with selectors.DefaultSelector() as ready, open(0, "rb", buffering=0) as orders:
        ready.register(woken, selectors.EVENT_READ)
        ready.register(orders, selectors.EVENT_READ)
        rest = b""
        while True:
            for key, _ in ready.select():
                if key.fileobj == woken:
                    os.read(woken, 4096)
                    _reap(alive)
                    continue
                data = orders.read(65536)
                if not data:
                    _end(alive)
                    return 0
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    alive.add(pid := _fork(orjson.loads(line), orders))
                    _say({"pid": pid})


def _end(alive: set[int]) -> None:
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in alive:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _reap(alive: set[int]) -> None:
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        alive.discard(pid)
        _say({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _say(value: dict[str, int]) -> None:
    os.write(1, orjson.dumps(value) + b"\n")


def _fork(order: dict[str, Any], orders: IO[bytes]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        _redirect(order["log"])
        if order["module"] is None:
            os.execv(order["argv"][0], order["argv"])
        code = int(importlib.import_module(order["module"]).main(order["argv"]))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _redirect(log: str) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)


if __name__ == "__main__":
    raise SystemExit(main())
