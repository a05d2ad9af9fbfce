"""The client leaves, in every phase: the backend's connection closes at once and a record stays."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time

import numpy as np
import pytest

from proxy.relay import headers as names
from tests.proxy.conftest import CHAT, Rig
from tests.support import wire
from tests.support.fake_backend import PeerCloses, Script, Until
from tests.support.timers import Timers
from tests.support.waiting import PATIENCE, wait_until
from verifier_pool.link.queue import OPEN

_FRAME = wire.chunk(wire.CONTENT[0] * 20)
_LARGE = wire.whole(wire.BODY.replace(b"One two three", b"x" * 8_000_000))
_STREAMS: dict[str, Script] = {
    "before headers": [PeerCloses()],
    "after headers": [wire.SSE_HEAD, PeerCloses()],
    "midway": [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:3]), PeerCloses()],
    "slow reader": [wire.SSE_HEAD, wire.chunk(wire.ROLE), *[_FRAME] * 3000, PeerCloses()],
}
_WHOLES: dict[str, Script] = {
    "before headers": [PeerCloses()],
    "after headers": [wire.whole(wire.BODY).partition(b"\r\n\r\n")[0] + b"\r\n\r\n", PeerCloses()],
    "midway": [wire.whole(wire.BODY)[:-50], PeerCloses()],
}


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    """Those of proxies that start from here on."""
    return Timers(monkeypatch)


def _request(rig: Rig, **fields: object) -> socket.socket:
    body = json.dumps(CHAT | fields).encode()
    client = socket.create_connection(("127.0.0.1", rig.proxy.port), timeout=PATIENCE)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    client.sendall(head % len(body) + body)
    return client


def _leave(client: socket.socket, *, reset: bool) -> None:
    if reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def _there(rig: Rig, client: socket.socket, phase: str, stream: bool) -> None:
    """Wait until the request is where it is to be left."""
    wait_until(lambda: rig.backend.requests)
    if stream and phase == "midway":
        got = b""
        while b" two" not in got:
            got += client.recv(65536)
    elif phase == "slow reader":
        wait_until(lambda: _stands_still(rig))
    elif phase != "before headers":
        time.sleep(0.05)


def _stands_still(rig: Rig) -> bool:
    before = len(rig.backend.last.sent)
    time.sleep(0.2)
    return 0 < before == len(rig.backend.last.sent)


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize(
    ("phase", "stream"),
    [*((phase, True) for phase in _STREAMS), *((phase, False) for phase in _WHOLES)],
    ids=[*(f"{phase}, stream" for phase in _STREAMS), *(f"{phase}, whole" for phase in _WHOLES)],
)
def test_upstream_is_closed_at_once(timers: Timers, rig: Rig, phase: str, stream: bool, reset: bool) -> None:
    """Whoever leaves is seen to: no timer of the proxy has to ring for it."""
    rig.backend.script = (_STREAMS if stream else _WHOLES)[phase]
    rig.redis.delete(OPEN)
    client = _request(rig, stream=stream)
    if phase == "slow reader":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    _there(rig, client, phase, stream)
    (id,) = rig.open_ids()
    with timers.stopped():
        _leave(client, reset=reset)
        assert rig.backend.last.peer_closed.wait(PATIENCE)
    if phase == "before headers":
        verdict = rig.verdict(id)
        assert (verdict["verdict"], verdict["reasons"]) == ("unverified", ["client_left"])
    else:
        evidence = rig.evidence(id)
        assert "client_left" in evidence.faults
        assert not evidence.complete
        if stream and phase == "midway":
            np.testing.assert_array_equal(evidence.output_ids, [11, 12])
    wait_until(lambda: rig.proxy.drain.in_flight == 0)
    assert all(backend.outstanding == 0 for backend in rig.proxy.services.backends.all)


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
def test_a_whole_answer_that_nobody_reads_is_given_up(rig: Rig, reset: bool) -> None:
    """The backend is through with it; what is left of the request is the proxy's own."""
    rig.backend.script = [_LARGE]
    client = _request(rig)
    client.recv(100)
    _leave(client, reset=reset)
    wait_until(lambda: rig.proxy.drain.in_flight == 0)
    assert all(backend.outstanding == 0 for backend in rig.proxy.services.backends.all)


def test_a_slow_reader_holds_the_backend_back(rig: Rig) -> None:
    rig.backend.script = _STREAMS["slow reader"]
    client = _request(rig, stream=True, logprobs=True, top_logprobs=20)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.recv(100)
    wait_until(lambda: _stands_still(rig))
    assert len(rig.backend.last.sent) < 2500
    client.close()
    wait_until(lambda: rig.proxy.drain.in_flight == 0)


def test_leaving_while_the_body_is_still_sent(rig: Rig) -> None:
    client = socket.create_connection(("127.0.0.1", rig.proxy.port), timeout=PATIENCE)
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    wait_until(lambda: rig.proxy.drain.in_flight == 1)
    client.close()
    wait_until(lambda: rig.proxy.drain.in_flight == 0)
    assert rig.backend.requests == []


def test_leaving_during_the_inline_wait(rig: Rig) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    client = socket.create_connection(("127.0.0.1", rig.proxy.port), timeout=PATIENCE)
    body = json.dumps(CHAT).encode()
    mode = names.MODE + b": inline"
    client.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n%s\r\ncontent-length: %d\r\n\r\n%s"
        % (mode, len(body), body)
    )
    wait_until(lambda: rig.backend.requests)
    time.sleep(0.2)
    client.close()
    wait_until(lambda: rig.proxy.drain.in_flight == 0)


def test_one_that_left_does_not_stop_the_others(rig: Rig) -> None:
    go = threading.Event()
    rig.backend.script = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:3]), Until(go), *wire.stream()[4:]]
    clients = [_request(rig, stream=True) for _ in range(10)]
    wait_until(lambda: len(rig.backend.requests) == 10)
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
    wait_until(lambda: rig.proxy.drain.in_flight == 0)
