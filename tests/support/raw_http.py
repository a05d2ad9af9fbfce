"""An HTTP client on a raw socket: what came, when, in which pieces, and whether it ended as HTTP says it must."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

PATIENCE = 60.0


@dataclass
class Answer:
    """One answer. `parts` are what the socket gave, with the chunked coding undone, and when (monotonic).

    `whole` is false when the body did not end as its head says.
    """

    status: int
    headers: list[tuple[str, str]]
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    whole: bool = False

    @property
    def body(self) -> bytes:
        """Everything."""
        return b"".join(part for _, part in self.parts)

    def all(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for key, value in self.headers if key == name]

    def header(self, name: str) -> str:
        """The first value of a header, or nothing."""
        return next(iter(self.all(name)), "")

    def json(self) -> Any:
        """The body as JSON."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise AssertionError(f"the body is no JSON: {self.body[:200]!r}") from error


class Call:
    """One request on a connection of its own; `leave` may be called at any time."""

    def __init__(self, url: str, path: str, body: bytes, headers: dict[str, str], *, method: str = "POST") -> None:
        target = urlsplit(url)
        self.socket = socket.create_connection((target.hostname or "", target.port or 80), timeout=PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        self._answer: Answer | None = None
        head = {"host": target.netloc, "connection": "close", "content-type": "application/json"}
        if not {"content-length", "transfer-encoding"} & headers.keys():
            head["content-length"] = str(len(body))
        rows = [f"{method} {target.path.rstrip('/')}{path} HTTP/1.1"]
        rows += [f"{name}: {value}" for name, value in (head | headers).items()]
        self.sent_at = time.monotonic()
        self.send("\r\n".join(rows).encode("latin-1") + b"\r\n\r\n" + body)

    def send(self, data: bytes) -> None:
        """Send more."""
        self.socket.sendall(data)

    def leave(self, *, reset: bool = False) -> float:
        """Close; returns when."""
        if reset:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        left = time.monotonic()
        self.socket.close()
        return left

    def head(self) -> Answer:
        """Wait for status and headers."""
        if self._answer is None:
            while True:
                while b"\r\n\r\n" not in self._buffer:
                    assert self._receive(), "the connection was closed without an answer"
                head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
                line, *rows = head.decode("latin-1").split("\r\n")
                status = int(line.split(" ")[1])
                if status >= 200:
                    break
            pairs = [(name.strip().lower(), value.strip()) for name, _, value in (row.partition(":") for row in rows)]
            self._answer = Answer(status, pairs)
        return self._answer

    def pieces(self) -> Iterator[bytes]:
        """The body as it comes; also collected in the answer."""
        answer = self.head()
        for piece in self._chunks() if answer.header("transfer-encoding") else self._plain(answer):
            answer.parts.append((time.monotonic(), piece))
            yield piece

    def until(self, text: bytes) -> bytes:
        """Read on until `text` has come; returns the body so far."""
        answer = self.head()
        if text not in answer.body:
            for _ in self.pieces():
                if text in answer.body:
                    break
        assert text in answer.body, answer.body
        return answer.body

    def answer(self) -> Answer:
        """Read it to the end."""
        try:
            for _ in self.pieces():
                pass
        except ConnectionError:
            pass
        self.socket.close()
        return self.head()

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.socket.close()

    def _receive(self) -> bool:
        data = self.socket.recv(65536)
        self._buffer += data
        return bool(data)

    def _plain(self, answer: Answer) -> Iterator[bytes]:
        length = answer.header("content-length")
        left = int(length) - len(answer.body) if length else None
        while left is None or left > 0:
            if not self._buffer and not self._receive():
                answer.whole = left is None
                return
            piece, self._buffer = self._buffer[:left], self._buffer[left:] if left is not None else b""
            left = None if left is None else left - len(piece)
            yield piece
        answer.whole = True

    def _chunks(self) -> Iterator[bytes]:
        answer = self.head()
        while True:
            ready, size = self._chunk()
            if size == 0:
                answer.whole = True
            if ready:
                yield ready
            if size == 0 or (size is None and not self._receive()):
                return

    def _chunk(self) -> tuple[bytes, int | None]:
        """All whole chunks in the buffer; 0 when the last one was among them, None when more must be read."""
        out = []
        at, size = 0, -1
        while size and (end := self._buffer.find(b"\r\n", at)) >= 0:
            size = int(self._buffer[at:end].split(b";")[0], 16)
            if len(self._buffer) < end + size + 4:
                size = -1
                break
            out.append(self._buffer[end + 2 : end + 2 + size])
            at = end + size + 4
        self._buffer = self._buffer[at:]
        return b"".join(out), 0 if size == 0 else None
