"""The client leaves, in every phase: the backend's connection closes at once and a record stays."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from proxy.relay import headers as names
from tests.proxy.conftest import CHAT, Rig
from tests.support import wire
from tests.support.fake_backend import PeerCloses, Script, Until
from verifier_pool.queue import OPEN

# A busy machine is late now and then; that it is less than 0.1 s otherwise is held by tests/fidelity.
_AT_ONCE = 0.3


def _request(rig: Rig, **fields: object) -> socket.socket:
    body = json.dumps(CHAT | fields).encode()
    client = socket.create_connection(("127.0.0.1", rig.proxy.port), timeout=5)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    client.sendall(head % len(body) + body)
    return client


def _until(condition: Callable[[], object], timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _leave(client: socket.socket, *, reset: bool) -> float:
    if reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    return time.monotonic()


def _only_open(rig: Rig) -> str:
    return rig.open_ids()[-1]


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    ("phase", "stream", "script", "ready"),
    [
        ("before headers", True, [PeerCloses()], b""),
        ("after headers", True, [wire.SSE_HEAD, PeerCloses()], b""),
        ("mid-stream", True, [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:3]), PeerCloses()], b" two"),
        ("non-stream", False, [PeerCloses()], b""),
        ("non-stream body", False, [wire.whole(wire.BODY)[:-50], PeerCloses()], b""),
    ],
)
def test_upstream_is_closed_at_once(
    rig: Rig, phase: str, stream: bool, script: Script, ready: bytes, reset: bool
) -> None:
    rig.redis.delete(OPEN)
    rig.backend.script = script
    client = _request(rig, stream=stream)
    _until(lambda: rig.backend.requests)
    got = b""
    while ready and ready not in got:
        got += client.recv(65536)
    if phase in ("after headers", "non-stream body"):
        time.sleep(0.1)
    id = _only_open(rig)
    left = _leave(client, reset=reset)
    assert rig.backend.last.peer_closed.wait(2)
    assert rig.backend.last.peer_closed_at - left < _AT_ONCE
    if phase in ("before headers", "non-stream"):
        verdict = rig.verdict(id)
        assert (verdict["verdict"], verdict["reasons"]) == ("unverified", ["client_left"])
    else:
        evidence = rig.evidence(id)
        assert "client_left" in evidence.faults
        assert not evidence.complete
        if phase == "mid-stream":
            np.testing.assert_array_equal(evidence.output_ids, [11, 12])
    _until(lambda: rig.proxy.drain.in_flight == 0)
    assert all(backend.outstanding == 0 for backend in rig.proxy.services.backends.all)


def test_a_slow_reader_holds_the_backend_back_and_may_leave(rig: Rig) -> None:
    frame = wire.chunk(wire.CONTENT[0] * 20)
    rig.backend.script = [wire.SSE_HEAD, wire.chunk(wire.ROLE), *[frame] * 3000, PeerCloses()]
    client = _request(rig, stream=True, logprobs=True, top_logprobs=20)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.recv(100)

    def stalled() -> bool:
        before = len(rig.backend.last.sent)
        time.sleep(0.4)
        return 0 < before == len(rig.backend.last.sent)

    _until(stalled, 20)
    assert len(rig.backend.last.sent) < 2500
    left = _leave(client, reset=True)
    assert rig.backend.last.peer_closed.wait(2)
    assert rig.backend.last.peer_closed_at - left < 1
    _until(lambda: rig.proxy.drain.in_flight == 0)


def test_leaving_while_the_body_is_still_sent(rig: Rig) -> None:
    client = socket.create_connection(("127.0.0.1", rig.proxy.port), timeout=5)
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    _until(lambda: rig.proxy.drain.in_flight == 1)
    client.close()
    _until(lambda: rig.proxy.drain.in_flight == 0)
    assert rig.backend.requests == []


def test_leaving_during_the_inline_wait(rig: Rig) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    client = socket.create_connection(("127.0.0.1", rig.proxy.port), timeout=5)
    body = json.dumps(CHAT).encode()
    mode = names.MODE + b": inline"
    client.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n%s\r\ncontent-length: %d\r\n\r\n%s"
        % (mode, len(body), body)
    )
    _until(lambda: rig.backend.requests)
    time.sleep(0.2)
    client.close()
    _until(lambda: rig.proxy.drain.in_flight == 0)


def test_one_that_left_does_not_stop_the_others(rig: Rig) -> None:
    go = threading.Event()
    rig.backend.script = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:3]), Until(go), *wire.stream()[4:]]
    clients = [_request(rig, stream=True) for _ in range(10)]
    _until(lambda: len(rig.backend.requests) == 10)
    for client in clients[::2]:
        client.close()
    go.set()
    for client in clients[1::2]:
        got = b""
        while b"[DONE]" not in got:
            part = client.recv(65536)
            assert part
            got += part
        client.close()
    _until(lambda: rig.proxy.drain.in_flight == 0)
