"""A port whose queue is full: the kernel drops what wants to connect."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from types import TracebackType


class BlackHole:
    """A context manager with the `url` of such a port."""

    def __init__(self, port: int = 0) -> None:
        self._port = port
        self._stack = ExitStack()
        self.url = ""

    def __enter__(self) -> BlackHole:
        listening = self._stack.enter_context(socket.socket())
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", self._port))
        listening.listen(0)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        for _ in range(4):
            filling = self._stack.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(listening.getsockname())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
