"""Requests byte by byte, over real sockets."""

from __future__ import annotations

import json
import socket
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

from tests.proxy.conftest import CHAT, Rig
from tests.support import wire
from tests.support.waiting import PATIENCE

MakeRig = Callable[..., Rig]
POST = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"host: localhost\r\n"
CLOSE = b"connection: close\r\n"
BODY = json.dumps(CHAT).encode()


def length(body: bytes = BODY) -> bytes:
    return b"content-length: %d\r\n" % len(body)


WHOLE = POST + HOST + CLOSE + length() + b"\r\n" + BODY


class Wire:
    """A client's socket."""

    def __init__(self, rig: Rig) -> None:
        self.socket = socket.create_connection(("127.0.0.1", rig.proxy.port), timeout=PATIENCE)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, parts: Iterable[bytes]) -> None:
        """Send what is taken; the other side may have had enough."""
        try:
            for part in parts:
                self.socket.sendall(part)
        except ConnectionError:
            pass

    def answer(self) -> bytes:
        """The next answer, which says its length."""
        got = b""
        while b"\r\n\r\n" not in got:
            got += self._more()
        head = got.partition(b"\r\n\r\n")[0].lower()
        length = int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
        while len(got) < len(head) + 4 + length:
            got += self._more()
        return got

    def _more(self) -> bytes:
        data = self.socket.recv(65536)
        assert data, "the connection was closed"
        return data

    def rest(self) -> bytes:
        """Everything that comes until the other side closes."""
        parts = []
        try:
            while data := self.socket.recv(65536):
                parts.append(data)
        except ConnectionResetError:
            pass
        return b"".join(parts)


def ask(rig: Rig, *parts: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of the answer, the only one, to these bytes."""
    with Wire(rig) as client:
        client.send(parts)
        return error_of(client.rest())


def error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    assert answer.startswith(b"HTTP/1.1 "), answer[:500]
    assert answer.count(b"HTTP/1.1 4") + answer.count(b"HTTP/1.1 5") == 1, answer[:500]
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower(), head
    error: dict[str, Any] = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return int(head.split(b" ")[1]), error


def works(rig: Rig) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    assert rig.chat().status_code == 200


def memory() -> int:
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    tracemalloc.reset_peak()
    return tracemalloc.get_traced_memory()[0]
