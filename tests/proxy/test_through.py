"""Streams that go on as they did before pass without the task that serves them, and end as any other does."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from proxy.relay.through import Through
from proxy.tap.stream import StreamTap
from tests.proxy.conftest import CHAT, Rig
from tests.support import wire
from tests.support.deadlines import Deadlines
from tests.support.fake_backend import Close, PeerCloses, Received, Step, Until
from tests.support.waiting import PATIENCE, wait_until
from verifier_pool.link.queue import OPEN


def _compact(event: bytes) -> bytes:
    """As engines spell it."""
    return b"data: " + json.dumps(json.loads(event[6:]), separators=(",", ":")).encode() + b"\n\n"


CONTENT = [_compact(event) for event in wire.CONTENT]
_START = [wire.SSE_HEAD, wire.chunk(_compact(wire.ROLE)), wire.chunk(CONTENT[0])]
_STILL = 50
"""How often in a row a backend that was asked had sent no more: too often for one that goes on."""
_END = [*(wire.chunk(_compact(event)) for event in (wire.FINISH, wire.USAGE)), wire.chunk(wire.DONE) + wire.LAST_CHUNK]


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was passed on where it arrived."""
    found: list[bytes] = []
    take = Through.take

    def noting(self: Through, data: bytes) -> bool:
        done = take(self, data)
        if done:
            found.append(data)
        return done

    monkeypatch.setattr(Through, "take", noting)
    return found


class _Gated:
    """Frames of which each is sent once the client has the one before."""

    def __init__(self, rig: Rig, *frames: bytes) -> None:
        self._rig = rig
        self._gates = [threading.Event() for _ in (*frames, b"")]
        pairs = zip(self._gates, (*map(wire.chunk, frames), b""), strict=True)
        self.steps: list[Step] = [step for gate, data in pairs for step in (Until(gate), data) if step]

    def ask(self) -> tuple[str, bytes]:
        """The answer's id and its body."""
        got, gates = b"", iter(self._gates)
        with self._rig.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
            for data in answer.iter_raw():
                got += data
                for _ in range(data.count(b'"content":"')):
                    # The role's event says "", and is no reason for anything.
                    if got.count(b'"content":"') > 1:
                        next(gates, threading.Event()).set()
        return answer.headers["x-countersign-id"], got


def _texts(body: bytes) -> list[str]:
    events = [json.loads(event[6:]) for event in body.split(b"\n\n") if event.startswith(b"data: {")]
    return [choice["delta"].get("content", "") for event in events for choice in event.get("choices", [])]


def _error(body: bytes) -> str:
    code: str = json.loads(body.split(b"\n\n")[-2][6:])["error"]["code"]
    return code


def test_all_that_is_usual(rig: Rig, passed: list[bytes]) -> None:
    gated = _Gated(rig, *CONTENT[1:] * 6)
    rig.backend.script = [*_START, *gated.steps, *_END]
    id, body = gated.ask()
    assert _texts(body) == ["", "One", *[" two", " three"] * 6, ""]
    assert b"token_id:" not in body
    assert body.endswith(b"data: [DONE]\n\n")
    assert passed == CONTENT[1:] * 6
    evidence = rig.evidence(id)
    assert evidence.output_ids.tolist() == [11, *[12, 13] * 6]
    assert evidence.claim_ids[:, 0].tolist() == [11, *[12, 13] * 6]
    assert evidence.complete
    assert not set(evidence.faults)


def test_an_end_in_the_middle(rig: Rig, passed: list[bytes]) -> None:
    gated = _Gated(rig, *CONTENT[1:])
    rig.backend.script = [*_START, *gated.steps, Close(reset=True)]
    id, body = gated.ask()
    assert passed == CONTENT[1:]
    assert _texts(body) == ["", "One", " two", " three"]
    assert b"[DONE]" not in body
    assert _error(body) == "upstream_closed"
    evidence = rig.evidence(id)
    assert "upstream_closed" in evidence.faults
    assert evidence.output_ids.tolist() == [11, 12, 13]


def test_silence_counts_from_what_was_passed_on(rig: Rig, passed: list[bytes], deadlines: Deadlines) -> None:
    gated = _Gated(rig, CONTENT[1])
    rig.backend.script = [*_START, *gated.steps, PeerCloses()]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(gated.ask)
        wait_until(lambda: passed)
        _, until = deadlines.moved[-1]
        deadlines.end()
        _, body = asked.result()
    assert until >= rig.backend.last.sent[-1] + rig.proxy.services.settings.timeouts.idle
    assert passed == [CONTENT[1]]
    assert _texts(body) == ["", "One", " two"]
    assert _error(body) == "upstream_timeout"


def test_what_breaks_its_reader_ends_the_stream_at_once(
    rig: Rig, passed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not with the next bytes of a backend that has nothing more to say."""
    pass_on = StreamTap._pass_on

    def broken(self: StreamTap, data: bytes) -> bytes | None:
        if b" three" in data:
            raise ValueError("odd")
        return pass_on(self, data)

    monkeypatch.setattr(StreamTap, "_pass_on", broken)
    gated = _Gated(rig, *CONTENT[1:])
    rig.backend.script = [*_START, *gated.steps, PeerCloses()]
    id, body = gated.ask()
    assert passed == [CONTENT[1]]
    assert _texts(body) == ["", "One", " two"]
    assert (_error(body), body.count(b'"error"')) == ("unreadable", 1)
    assert b"[DONE]" not in body
    assert set(rig.evidence(id).faults) == {"unreadable"}


def test_a_client_that_leaves(rig: Rig, passed: list[bytes]) -> None:
    gate = threading.Event()
    rest: list[Step] = [Until(gate), wire.chunk(CONTENT[1]), 0.05, wire.chunk(CONTENT[2]), PeerCloses()]
    rig.backend.script = [*_START, *rest]
    rig.redis.delete(OPEN)
    body = json.dumps(CHAT | {"stream": True}).encode()
    with socket.create_connection(("127.0.0.1", rig.proxy.port), timeout=PATIENCE) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n")
        client.sendall(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        got = b""
        while b" three" not in got:
            got += client.recv(65536)
            if b'"One"' in got:
                gate.set()
        (id,) = rig.open_ids()
    assert rig.backend.last.peer_closed.wait(PATIENCE)
    evidence = rig.evidence(id)
    np.testing.assert_array_equal(evidence.output_ids, [11, 12, 13])
    assert "client_left" in evidence.faults


def test_a_client_that_is_behind_holds_the_backend_up(rig: Rig) -> None:
    """What is on its way then is what the kernel's buffers hold, of which nobody knows how large they grow: a backend
    that is not held up sends until more is on its way than they ever do."""
    event = CONTENT[1].replace(b" two", b" two" + b"x" * 1000)
    enough, most = threading.Event(), 100_000_000 // len(event)

    def frames(asked: Received) -> Any:
        yield from _START
        for _ in range(most):
            if enough.is_set():
                break
            yield wire.chunk(event)
        yield from _END

    rig.backend.script = frames
    body = json.dumps(CHAT | {"stream": True}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE)
        client.connect(("127.0.0.1", rig.proxy.port))
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n")
        client.sendall(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        wait_until(lambda: rig.backend.requests and len(rig.backend.last.sent) > len(_START))
        counts: list[int] = []

        def stands_still() -> bool:
            counts.append(len(rig.backend.last.sent))
            return len(counts) > _STILL and counts[-1] == counts[-_STILL]

        wait_until(stands_still)
        enough.set()
        assert counts[-1] < most
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        got = b""
        while data := client.recv(1 << 20):
            got += data
    assert got.count(b" two") == len(rig.backend.last.sent) - len(_START) - len(_END)
    assert got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
