"""A cable between workers and Redis that can be cut without a word, as a firewall or a machine that is gone does it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Relay:
    """Passes bytes between clients of `url` and a Unix socket.

    `silence` stops that for all connections which are open then, without closing any.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._age = 0
        self.url = f"redis://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self) -> None:
        """Whoever is connected hears nothing any more and is heard by nobody."""
        self._age += 1

    def close(self) -> None:
        """The end of it, with all connections."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        for each in (self._listening, *self._sockets):
            with contextlib.suppress(OSError):
                each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._path)
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(*ends, self._age), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, age: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if age != self._age:
                    return
                target.sendall(data)
            for each in (source, target):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def relayed(valkey_url: str) -> Iterator[Relay]:
    """A relay to a Valkey on a Unix socket."""
    relay = Relay(valkey_url.removeprefix("unix://"))
    try:
        yield relay
    finally:
        relay.close()
