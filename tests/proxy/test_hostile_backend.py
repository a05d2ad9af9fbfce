"""Backends that send without end: the memory of a whole proxy process, as the kernel counts it, has a bound."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proxy.test_serve import Serve
from tests.support import wire
from tests.support.hostile import Hostile, kinds
from tests.support.waiting import PATIENCE

# Kinds that are read as fast as they come; the slow ones are bounded by time as well.
STREAMS = ("line", "lines", "data lines", "long text", "ids", "wide", "experts", "ends", "deep", "usage", "reasons")
HEADS = ("header", "headers", "same headers", "status line", "chunk size", "chunk extension", "trailer", "trailers")
MOST_SENT = 60_000_000
# Kinds that cost more to read than to send, or become more than was sent.
SHORTER = {
    1_000_000: ("tokens", "empty choices", "indices", "calls", "prompts", "1xx", "tiny chunks", "same call", "text"),
    300_000: ("comments", "blank lines", "no json"),
    10_000_000: (
        "data",
        "huge numbers",
        "rows",
        "calls at once",
        "choices at once",
        "long indices",
        "fields",
        "NaN",
        "error",
    ),
    20_000_000: ("whole spaces", "whole text", "whole choices", "whole numbers", "whole lists", "whole deep"),
    9_000_000: ("whole error", "whole page"),
    3_000: ("gzip", "zstd", "gzip line", "zstd line", "whole gzip", "whole zstd"),
}
MOST_KEPT = 256 * 1024


@pytest.fixture(scope="module")
def hostile() -> Iterator[Hostile]:
    with Hostile(most=MOST_SENT) as backend:
        yield backend


@pytest.fixture(scope="module")
def proxy(hostile: Hostile, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    folder = tmp_path_factory.mktemp("proxy")
    settings = {
        "port": 0,
        "embedded_dir": str(folder / "state"),
        "models": {"m": {"vocab_size": 1000}},
        "backends": [{"name": "b", "url": hostile.url, "model": "m", "served_model": "served"}],
        "timeouts": {"total": 3, "first_byte": 3},
        "relay": {"retries": 0},
        "breaker": {"failures": 1_000_000},
    }
    running = Serve(folder, settings)
    try:
        running.ready()
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        assert running.process.stderr is not None
        running.process.stderr.close()


def _kib(process: int, name: str) -> int:
    rows = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith(name))


def _answer(proxy: Serve, hostile: Hostile, kind: str) -> tuple[bytes, bytes, int]:
    """How the client's answer to one backend of that kind begins and ends, and by how much the proxy grew meanwhile."""
    hostile.parts = kinds()[kind]
    process = proxy.process.pid
    Path(f"/proc/{process}/clear_refs").write_text("5")  # forgets the highest mark so far
    before = _kib(process, "VmRSS")
    body = json.dumps({"model": "m", "messages": [], "stream": True, "n": 4}).encode()
    with socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2])), timeout=PATIENCE) as client:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        first, last = b"", b""
        with contextlib.suppress(ConnectionError):
            while data := client.recv(1 << 20):
                first, last = first or data, (last + data)[-2000:]
    return first, last, _kib(process, "VmHWM") - before


@pytest.mark.parametrize("kind", [*STREAMS, *HEADS])
def test_a_stream_without_end(proxy: Serve, hostile: Hostile, kind: str) -> None:
    first, last, grown = _answer(proxy, hostile, kind)
    # Who has not taken all of it when its time is over is cut off.
    assert b'{"error":' in last or not last.endswith(wire.LAST_CHUNK)
    assert b"[DONE]" not in last
    assert first.startswith((b"HTTP/1.1 200", b"HTTP/1.1 502", b"HTTP/1.1 504"))
    assert grown < MOST_KEPT


@pytest.mark.parametrize(("most", "kind"), [(most, kind) for most, some in SHORTER.items() for kind in some])
def test_what_breaks_off_is_not_kept_either(
    proxy: Serve, hostile: Hostile, monkeypatch: pytest.MonkeyPatch, most: int, kind: str
) -> None:
    monkeypatch.setattr(hostile, "most", most)
    first, last, grown = _answer(proxy, hostile, kind)
    assert b"[DONE]" not in last
    assert first.startswith(b"HTTP/1.1 ")
    assert grown < MOST_KEPT


def test_every_kind_is_tried() -> None:
    assert {*STREAMS, *HEADS, *(kind for some in SHORTER.values() for kind in some)} == {*kinds()}
