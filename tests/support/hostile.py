"""A backend that sends as much as it can of whatever it likes, for as long as anybody reads it."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import TracebackType
from typing import Any

import zstandard

_PIECE = 64 * 1024
STREAM = b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\n"
JSON = b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\n"
END = b"connection: close\r\n\r\n"


def _event(**choice: Any) -> bytes:
    delta = choice.pop("delta", {})
    fields = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | choice
    return b"data: " + json.dumps({"id": "c", "model": "served", "choices": [fields]}).encode() + b"\n\n"


def _call(index: int, name: str = "") -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": {"name": name, "arguments": ""}}]}


def _entry(width: int) -> dict[str, Any]:
    top = [{"token": f"token_id:{n}", "logprob": -1.0} for n in range(width)]
    return {"content": [{"token": "token_id:1", "logprob": -1.0, "bytes": None, "top_logprobs": top}]}


class _Parts:
    """Parts that are made again for everybody who asks."""

    def __init__(self, make: Callable[[], Iterator[bytes]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[bytes]:
        return self._make()


def _after(start: list[bytes], parts: Iterable[bytes]) -> Iterable[bytes]:
    return _Parts(lambda: itertools.chain(start, parts))


def _endless(*parts: bytes) -> Iterable[bytes]:
    pieces = [part * max(1, _PIECE // max(1, len(part))) for part in parts]
    return _Parts(lambda: itertools.cycle(pieces))


def _numbered(make: Callable[[int], bytes]) -> Iterable[bytes]:
    return _Parts(lambda: (b"".join(map(make, range(at, at + 100))) for at in itertools.count(0, 100)))


def _bomb(start: bytes, again: bytes, coding: str) -> Iterator[bytes]:
    deflate = zlib.compressobj(9, zlib.DEFLATED, 31)
    compress = deflate.compress if coding == "gzip" else zstandard.ZstdCompressor(level=1).compressobj().compress
    yield compress(start)
    block = again * (1_000_000 // len(again))
    while True:
        yield compress(block)


def _codings(head: bytes, start: bytes, again: bytes) -> dict[str, Iterable[bytes]]:
    return {
        coding: _after(
            [head + b"content-encoding: " + coding.encode() + b"\r\n" + END],
            _Parts(partial(_bomb, start, again, coding)),
        )
        for coding in ("gzip", "zstd")
    }


def _stream(parts: Iterable[bytes]) -> Iterable[bytes]:
    return _after([STREAM + END], parts)


def _whole(start: bytes, parts: Iterable[bytes]) -> Iterable[bytes]:
    return _after([JSON + END, start], parts)


@cache
def kinds() -> dict[str, Iterable[bytes]]:
    """Everything it can do, by name; the names of what is no stream begin with `whole`."""
    big = "x" * 1_000_000
    ids = list(range(100_000))
    chunked = STREAM + b"transfer-encoding: chunked\r\n\r\n"
    stream = {
        "line": _endless(b"x"),
        "data": _after([b"data: "], _endless(b"x")),
        "lines": _endless(b"a\n"),
        "data lines": _endless(b"data:\n"),
        "comments": _endless(b": ping\n\n"),
        "blank lines": _endless(b"\n"),
        "empty choices": _endless(b'data: {"choices":[]}\n\n'),
        "no json": _endless(b"data: {\n\n"),
        "tokens": _endless(_event(delta={"content": "ab"}, token_ids=[1], logprobs=_entry(20))),
        "text": _endless(_event(delta={"content": "é\U0001f600"})),
        "long text": _endless(_event(delta={"content": big, "reasoning": big})),
        "same call": _endless(_event(delta=_call(0))),
        "calls": _numbered(lambda n: _event(delta=_call(n, "f"))),
        "calls at once": _endless(
            b'data: {"choices":[{"index":0,"delta":{"tool_calls":[' + b"{}," * 300_000 + b"{}]}}]}\n\n"
        ),
        "indices": _numbered(lambda n: _event(index=n, delta={"content": "a"}, logprobs=_entry(2), token_ids=[1])),
        "long indices": _numbered(lambda n: _event(index=10**4000 + n, logprobs=_entry(2))),
        "choices at once": _endless(b'data: {"choices":[' + b"{}," * 300_000 + b"{}]}\n\n"),
        "fields": _endless(b"data: {" + b",".join(b'"%d":0' % n for n in range(300_000)) + b"}\n\n"),
        "prompts": _numbered(lambda n: _event(index=n % 4, prompt_token_ids=ids) if n % 100 == 0 else b""),
        "ids": _endless(_event(token_ids=ids)),
        "wide": _endless(_event(token_ids=[1], logprobs=_entry(100_000))),
        "rows": _endless(_event(logprobs={"content": [{"token": "token_id:1", "logprob": -1}] * 20_000})),
        "experts": _endless(_event(routed_experts=big * 10)),
        "reasons": _endless(_event(finish_reason=big, stop_reason=big)),
        "huge numbers": _endless(b'data: {"choices":[{"index":0,"token_ids":[' + b"9" * 4000 + b"]}]}\n\n"),
        "ends": _endless(_event(finish_reason="stop", delta={"content": big})),
        "deep": _endless(b"data: " + b"[" * 300_000 + b"]" * 300_000 + b"\n\n"),
        "NaN": _endless(b'data: {"a":NaN,"choices":[' + b"[]," * 300_000 + b"[]]}\n\n"),
        "usage": _endless(
            b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1,"x":['
            + b"[]," * 300_000
            + b"0]}}\n\n"
        ),
        "error": _endless(b'data: {"error":{"message":"x","y":[' + b"[]," * 300_000 + b"0]}}\n\n"),
    }
    heads: dict[str, Iterable[bytes]] = {
        "header": _after([b"HTTP/1.1 200 X\r\nx-a: "], _endless(b"x")),
        "headers": _after([b"HTTP/1.1 200 X\r\n"], _numbered(lambda n: b"x-%d: y\r\n" % n)),
        "same headers": _after([b"HTTP/1.1 200 X\r\n"], _endless(b"a:\r\n")),
        "status line": _after([b"HTTP/1.1 200 "], _endless(b"x")),
        "1xx": _endless(b"HTTP/1.1 103 Early Hints\r\nlink: <x>\r\n\r\n"),
        "chunk size": _after([chunked], _endless(b"0")),
        "chunk extension": _after([chunked + b"5;"], _endless(b"x")),
        "trailer": _after([chunked + b"0\r\nx-a: "], _endless(b"x")),
        "trailers": _after([chunked + b"0\r\n"], _numbered(lambda n: b"x-%d: y\r\n" % n)),
        "tiny chunks": _after([chunked], _endless(b"1\r\n:\r\n")),
    }
    bodies: dict[str, Iterable[bytes]] = {
        "whole spaces": _whole(b"", _endless(b" ")),
        "whole text": _whole(b'{"choices":[{"index":0,"message":{"content":"', _endless(b"x")),
        "whole choices": _whole(b'{"choices":[{}', _endless(b",{}")),
        "whole numbers": _whole(b'{"choices":[0', _endless(b",0")),
        "whole lists": _whole(b'{"x":NaN,"choices":[[]', _endless(b",[]")),
        "whole deep": _whole(b"", _endless(b"[")),
        "whole error": _after([JSON.replace(b"200", b"400") + END], _endless(b"x")),
        "whole page": _after([b"HTTP/1.1 500 X\r\ncontent-type: text/html\r\n" + END], _endless(b"x")),
    }
    for coding, parts in _codings(STREAM, b"", b": ping\n\n").items():
        heads[coding] = parts
    for coding, parts in _codings(STREAM, b"data: ", b"x").items():
        heads[f"{coding} line"] = parts
    for coding, parts in _codings(JSON, b"", b" ").items():
        bodies[f"whole {coding}"] = parts
    return {name: _stream(parts) for name, parts in stream.items()} | heads | bodies


@dataclass
class Hostile:
    """A context manager that listens and sends `parts` to whoever asks, `most` bytes of them.

    Attributes:
        finish: what follows them, for bodies that are to be read to their end.
        sent: bytes that were taken in the end.
        ever: the same of everybody who asked so far.
    """

    parts: Iterable[bytes] = ()
    most: int = 1_000_000_000
    finish: bytes = b""
    sent: int = 0
    ever: int = 0

    def __enter__(self) -> Hostile:
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._over = False
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over = True
        self._listening.close()

    def _serve(self) -> None:
        while not self._over:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            with client:
                try:
                    self._send(client)
                except OSError:
                    continue

    def _send(self, client: socket.socket) -> None:
        asked = b""
        client.settimeout(30)
        while b"\r\n\r\n" not in asked:
            if not (data := client.recv(65536)):
                return
            asked += data
        self.sent = 0
        for part in self.parts:
            client.sendall(part)
            self.sent += len(part)
            self.ever += len(part)
            if self.sent > self.most:
                client.sendall(self.finish)
                return
