"""Backends that send without end: the memory of a whole proxy process, as the kernel counts it, has a bound."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proxy.test_serve import Serve
from tests.support.hostile import Hostile, kinds

# Kinds that are read as fast as they come; the slow ones are bounded by time as well.
STREAMS = ("line", "lines", "data lines", "long text", "ids", "wide", "experts", "ends", "deep", "usage", "reasons")
HEADS = ("header", "headers", "same headers", "status line", "chunk size", "chunk extension", "trailer", "trailers")
MOST_SENT = 60_000_000
MOST_KEPT = 192 * 1024


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
        "timeouts": {"total": 10, "first_byte": 10},
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


@pytest.mark.parametrize("kind", [*STREAMS, *HEADS])
def test_a_stream_without_end(proxy: Serve, hostile: Hostile, kind: str) -> None:
    hostile.parts = kinds()[kind]
    process = proxy.process.pid
    Path(f"/proc/{process}/clear_refs").write_text("5")  # forgets the highest mark so far
    before = _kib(process, "VmRSS")
    body = json.dumps({"model": "m", "messages": [], "stream": True, "n": 4}).encode()
    with socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2])), timeout=30) as client:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        first, last = b"", b""
        while data := client.recv(1 << 20):
            first, last = first or data, (last + data)[-2000:]
    assert b'{"error":' in last
    assert b"[DONE]" not in last
    assert first.startswith((b"HTTP/1.1 200", b"HTTP/1.1 502", b"HTTP/1.1 504"))
    assert _kib(process, "VmHWM") - before < MOST_KEPT
