"""The pool under test: a real Valkey, CPU workers and a replay process, as an operator would start them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from redis import Redis

from benchmarks.harness.usage import cpu_seconds, descendants, tree_seconds
from policies.errors import CountersignError
from policies.settings import Settings, parse_settings, store_url
from proxy.embedded import EmbeddedValkey

WORKER = (sys.executable, "-m", "countersign", "worker")
READY = "ready: "
"""What a worker logs before it takes work."""
ENGINE_SECONDS = 420.0
"""What a reference gets to load."""
ROLES = ("verify", "replay", "engine", "store", "feeder")
"""CPU workers; the replay process; the engine's own processes; Valkey; this process, which plays the proxy."""


class Pool:
    """Starts the processes; a context manager.

    Args:
        settings: of `countersign.yaml`, without the store.
        workers: CPU worker processes.
        command: starts a worker; `--config` and what it shall do follow.

    Raises:
        CountersignError: a process did not start; the text ends with the tail of its log.
    """

    def __init__(self, settings: Mapping[str, Any], *, workers: int, command: Sequence[str] = WORKER) -> None:
        # A short name: a Unix socket's path goes below it and may have 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="cs-cost-"))
        self._tree = dict(settings) | {"embedded_dir": str(self.folder / "v")}
        self._workers = workers
        self._command = tuple(command)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = contextlib.ExitStack()
        self.settings: Settings = parse_settings(yaml.safe_dump(self._tree), {})
        self.url = store_url(self.settings, {})

    def __enter__(self) -> Pool:
        try:
            self._stack.enter_context(EmbeddedValkey(str(self.folder / "v")))
            self.redis = Redis.from_url(self.url)
            self._stack.callback(self.redis.close)
            self._write()
            self._spawn("replay", "--only", "replay")
            self._spawn_verify()
            self._wait("replay", 1, ENGINE_SECONDS)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def reconfigure(self, changes: Mapping[str, Any]) -> None:
        """Start the CPU workers anew with other settings; the reference goes on."""
        self._end("verify")
        self._tree |= changes
        self.settings = parse_settings(yaml.safe_dump(self._tree), {})
        self._write()
        self._spawn_verify()

    def cpu(self) -> dict[str, float]:
        """CPU seconds of every role so far."""
        replay = self._children["replay"].pid
        verify = self._children["verify"].pid
        store = int(self.redis.info("server")["process_id"])
        return {
            "verify": tree_seconds([verify, *descendants(verify)]),
            "replay": cpu_seconds(replay),
            "engine": tree_seconds(descendants(replay)),
            "store": cpu_seconds(store),
            "feeder": time.process_time(),
        }

    def check(self) -> None:
        """Raises CountersignError when a process has ended."""
        for name, child in self._children.items():
            if child.poll() is not None:
                raise CountersignError(f"{name} ended with code {child.returncode}\n{self.tail(name)}")

    def tail(self, name: str, lines: int = 30) -> str:
        """The end of a process's log."""
        with contextlib.suppress(OSError):
            return "\n".join((self.folder / f"{name}.log").read_text(errors="replace").splitlines()[-lines:])
        return ""

    def stop(self) -> None:
        """End every process and remove their folder."""
        for name in list(reversed(self._children)):
            self._end(name)
        self._stack.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self) -> None:
        (self.folder / "countersign.yaml").write_text(yaml.safe_dump(self._tree))

    def _spawn_verify(self) -> None:
        self._spawn("verify", "--only", "verify", "--processes", str(self._workers))
        self._wait("verify", self._workers, 120.0)

    def _spawn(self, name: str, *arguments: str) -> None:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("COUNTERSIGN_")}
        # A session of its own: Ctrl-C reaches us alone, and we end the children in order.
        with open(self.folder / f"{name}.log", "wb") as log:
            self._children[name] = subprocess.Popen(
                [*self._command, "--config", str(self.folder / "countersign.yaml"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
                start_new_session=True,
            )

    def _wait(self, name: str, count: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (self.folder / f"{name}.log").read_text(errors="replace").count(READY) < count:
            self.check()
            if time.monotonic() > deadline:
                raise CountersignError(f"{name} was not ready within {seconds:.0f} s\n{self.tail(name)}")
            time.sleep(0.1)

    def _end(self, name: str) -> None:
        child = self._children.pop(name)
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
