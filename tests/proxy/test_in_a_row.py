"""Requests that come before the one ahead of them is answered, and clients of HTTP/1.0."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.proxy.conftest import CHAT, Rig
from tests.proxy.raw import BODY, CLOSE, HOST, POST, WHOLE, Wire, length
from tests.support import wire
from tests.support.fake_backend import Close, PeerCloses, Step, Until
from tests.support.waiting import PATIENCE, wait_until

BEGUN: list[Step] = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:3])]
KEPT = POST + HOST + length() + b"\r\n" + BODY
STREAM = json.dumps(CHAT | {"stream": True}).encode()
OLD = b"POST /v1/chat/completions HTTP/1.0\r\n"


def _large(size: int) -> bytes:
    body = json.dumps(CHAT | {"user": "x" * size}).encode()
    return POST + HOST + length(body) + b"\r\n" + body


@pytest.mark.parametrize("more", [KEPT, KEPT * 3, _large(200_000), _large(200_000)[:-1], b"GET /healthz HT"])
@pytest.mark.parametrize("stream", [False, True])
def test_whoever_asks_again_meanwhile_is_seen_to_leave(rig: Rig, stream: bool, more: bytes) -> None:
    before = BEGUN if stream else []
    rig.backend.script = [*before, PeerCloses()]
    with Wire(rig) as client:
        body = STREAM if stream else BODY
        client.send([POST, HOST, length(body), b"\r\n", body])
        wait_until(lambda: rig.backend.requests and len(rig.backend.last.sent) == len(before))
        client.send([more])
    assert rig.backend.last.peer_closed.wait(PATIENCE)
    wait_until(lambda: rig.proxy.drain.in_flight == 0)
    assert len(rig.backend.requests) == 1


def test_a_large_one_is_not_read_behind_another(rig: Rig) -> None:
    go = threading.Event()
    rig.backend.script = [Until(go), wire.whole(wire.BODY)]
    with Wire(rig) as client:
        client.send([KEPT])
        wait_until(lambda: rig.backend.requests)
        client.send([_large(200_000)])
        go.set()
        answers = client.rest()
    assert answers.count(b"HTTP/1.1 ") == 2
    first, _, second = answers.rpartition(b"HTTP/1.1 ")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"413 ")
    assert json.loads(second.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_small_ones_are_answered_in_turn(rig: Rig) -> None:
    go = threading.Event()
    rig.backend.script = [Until(go), wire.whole(wire.BODY)]
    with Wire(rig) as client:
        client.send([KEPT])
        wait_until(lambda: rig.backend.requests)
        client.send([KEPT, _large(30_000), WHOLE])
        go.set()
        assert client.rest().count(b"HTTP/1.1 200 ") == 4
    assert len(rig.backend.requests) == 4


def _old(rig: Rig, body: bytes) -> bytes:
    with Wire(rig) as client:
        client.send([OLD, HOST, length(body), b"\r\n", body])
        return client.rest()


def _read(client: Wire) -> None:
    """All there is."""
    while client.socket.recv(65536):
        pass


def test_http_10_gets_no_chunks(rig: Rig) -> None:
    rig.backend.script = wire.stream()
    head, _, body = _old(rig, STREAM).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"content-length" not in head.lower()
    assert b"connection: close" in head.lower()
    assert body.startswith(b"data: {")
    assert body.endswith(wire.DONE)
    assert b"\r\n" not in body


@pytest.mark.parametrize("script", [[wire.whole(wire.BODY)], [wire.whole(b'{"error": {"message": "no"}}', 400)]])
def test_http_10_gets_a_length_where_there_is_one(rig: Rig, script: list[Step]) -> None:
    rig.backend.script = script
    head, _, body = _old(rig, BODY).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"content-length: %d" % len(body) in head.lower()
    assert json.loads(body)


def test_http_10_is_told_when_it_is_cut(make_rig: Callable[..., Rig], caplog: Any) -> None:
    """The end of the connection would be the end of the answer, but for a reset."""
    rig = make_rig()
    rig.backend.script = [wire.head(200, "application/octet-stream", "content-length: 10"), b"half", Close()]
    body = json.dumps({"model": "m", "input": "x"}).encode()
    with Wire(rig) as client:
        client.send([b"POST /v1/embeddings HTTP/1.0\r\n", HOST, CLOSE, length(body), b"\r\n", body])
        with pytest.raises(ConnectionResetError):
            _read(client)
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_http_10_streams_that_are_cut(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.backend.script = [wire.SSE_HEAD, *[wire.chunk(wire.CONTENT[0])] * 3, PeerCloses()]
    with Wire(rig) as client:
        client.send([OLD, HOST, length(STREAM), b"\r\n", STREAM])
        while b"One" not in client.socket.recv(65536):
            pass
        rig.proxy.drain.draining = True
        (task,) = rig.proxy.drain._tasks
        task.get_loop().call_soon_threadsafe(rig.proxy.drain.end)
        with pytest.raises(ConnectionResetError):
            _read(client)
    wait_until(lambda: rig.proxy.drain.in_flight == 0)
