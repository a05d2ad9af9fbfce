"""A backend's place is its own only until it has sent its last byte, whoever waits for what then."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from policies.settings import hash_key
from proxy.backends.turn import Turn
from proxy.relay import headers as names
from tests.proxy.backends.fleet import Fleet
from tests.proxy.conftest import CHAT, Rig
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, PeerCloses, Script, Step
from tests.support.waiting import wait_until
from verifier_pool.link.queue import OPEN

INLINE = {"x-countersign-mode": "inline"}
LARGE = wire.whole(wire.BODY.replace(b"One two three", b"x" * 16_000_000))
BUSY = wire.whole(b'{"error": {"message": "later"}}', 503)
NO_END: list[Step] = [wire.SSE_HEAD + b"".join(map(wire.chunk, wire.FRAMES)), PeerCloses()]
"""A stream whose last event is there and whose last chunk never comes."""
_REFUSED = b'data: {"error": {"message": "no", "code": 400}}\n\n'


def _one_place(make_rig: Callable[..., Rig], backend: FakeBackend, **sections: Any) -> Rig:
    one = {"name": "b1", "url": backend.url, "model": "m", "served_model": "served", "max_concurrency": 1}
    rig = make_rig(backends=[one], **{"routing": {"queue_seconds": 20}} | sections)
    rig.redis.delete(OPEN)
    return rig


def _outstanding(rig: Rig) -> int:
    return rig.proxy.services.backends.all[0].outstanding


@contextmanager
def _asking(rig: Rig, *, inline: bool, **fields: Any) -> Iterator[socket.socket]:
    """A client that has asked, and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20)
    client.connect(("127.0.0.1", rig.proxy.port))
    body = json.dumps(CHAT | fields).encode()
    mode = names.MODE + (b": inline" if inline else b": async")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n%s\r\ncontent-length: %d\r\n\r\n"
    with client:
        client.sendall(head % (mode, len(body)) + body)
        yield client


@pytest.mark.parametrize(
    ("stream", "script"),
    [(False, [wire.whole(wire.BODY)]), (True, wire.stream()), (True, NO_END)],
    ids=["whole", "stream", "stream without an end"],
)
def test_it_does_not_wait_for_a_verdict(
    make_rig: Callable[..., Rig], backend: FakeBackend, stream: bool, script: Script
) -> None:
    rig = _one_place(make_rig, backend, verification={"inline_wait": 60})
    backend.script = script
    with _asking(rig, inline=True, stream=stream) as first, _asking(rig, inline=True, stream=stream) as second:
        # One place, and each of them holds it only while it is answered: the second would never be asked.
        wait_until(lambda: len(backend.requests) == 2)
        wait_until(lambda: _outstanding(rig) == 0)
        backend.script = [wire.whole(wire.BODY)]
        assert rig.chat().status_code == 200
        assert rig.proxy.drain.in_flight >= 2
        for id in rig.open_ids():
            rig.decide(id, "pass", hash_key(""))
        for client in (first, second):
            got = b""
            while b"countersign " not in got and b'"countersign"' not in got:
                part = client.recv(65536)
                assert part
                got += part
    wait_until(lambda: rig.proxy.drain.in_flight == 0)
    assert _outstanding(rig) == 0


def test_nor_for_a_client_that_does_not_read(make_rig: Callable[..., Rig], backend: FakeBackend) -> None:
    rig = _one_place(make_rig, backend)
    backend.script = [LARGE]
    with _asking(rig, inline=False):
        wait_until(lambda: backend.requests and _outstanding(rig) == 0)
        backend.script = [wire.whole(wire.BODY)]
        assert rig.chat().status_code == 200
    wait_until(lambda: rig.proxy.drain.in_flight == 0)


def test_the_rest_of_a_stream_that_is_here_is_the_clients(make_rig: Callable[..., Rig], backend: FakeBackend) -> None:
    """Its last byte has come, although nobody has read up to it: the client has to make room first."""
    rig = _one_place(make_rig, backend)
    # What is asked for as evidence stays here: the client is sent a small part of what comes.
    shown = wire.chunk(wire.CONTENT[0].replace(b'"One"', json.dumps("x" * 4000).encode()))
    backend.script = [wire.SSE_HEAD, wire.chunk(wire.ROLE), *[shown] * 300, wire.chunk(wire.FINISH)]
    with _asking(rig, inline=False, stream=True) as client:
        wait_until(lambda: backend.requests)
        assert client.recv(100)
        backend.script = [wire.whole(wire.BODY)]
        assert _outstanding(rig) <= 1
    wait_until(lambda: rig.proxy.drain.in_flight == 0)
    assert _outstanding(rig) == 0


def test_the_next_one_has_a_place_of_its_own(
    make_rig: Callable[..., Rig], backend: FakeBackend, second: FakeBackend
) -> None:
    """A rejected answer is at neither backend while the other one is asked."""
    both = [
        {"name": name, "url": at.url, "model": "m", "served_model": "served", "max_concurrency": 1}
        for name, at in (("b1", backend), ("b2", second))
    ]
    rig = make_rig(backends=both, verification={"on_reject": "retry", "inline_wait": 30})
    backend.script = second.script = [wire.whole(wire.BODY)]
    with rig.worker("reject", hash_key("")), ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: rig.chat(headers=INLINE), range(8)))
    assert {answer.status_code for answer in answers} == {502}
    assert all(answer.json()["error"]["code"] == "verification_failed" for answer in answers)
    assert len(backend.requests) == len(second.requests) == 8
    assert [item.outstanding for item in rig.proxy.services.backends.all] == [0, 0]


_ENDINGS: dict[str, Script] = {
    "whole": [wire.whole(wire.BODY)],
    "stream": wire.stream(),
    "no end": NO_END,
    "no head": [Close(reset=True)],
    "half": [wire.whole(wire.BODY)[:-50], Close()],
    "half a stream": [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:3]), Close(reset=True)],
    "silence": [30.0],
    "silence in a body": [wire.whole(wire.BODY)[:-50], 30.0],
    "silence in a stream": [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:3]), 30.0],
    "busy": [BUSY],
    "refused": [wire.whole(b'{"error": {"message": "no"}}', 400)],
    "refused in a stream": [wire.SSE_HEAD + wire.chunk(_REFUSED), 30.0],
    "nonsense": [b"HTTP/1.1 999\r\n\r\n"],
    "not HTTP": [b"hello\r\n\r\n", Close()],
}


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ending", _ENDINGS)
def test_it_is_given_back_once(
    make_rig: Callable[..., Rig],
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
    stream: bool,
    inline: bool,
) -> None:
    well = ending in ("whole", "refused") or (stream and ending in ("stream", "no end", "refused in a stream"))
    rig = _one_place(
        make_rig,
        backend,
        timeouts={} if well else {"first_byte": 0.3, "idle": 0.3, "total": 20},
        verification={"inline_wait": 0.1},
        relay={"retries": 1},
    )
    seen: list[int] = []
    leave = type(rig.proxy.services.backends.all[0]).leave

    def counted(self: Any) -> None:
        leave(self)
        seen.append(self.outstanding)

    monkeypatch.setattr("proxy.backends.backend.Backend.leave", counted)
    backend.script = _ENDINGS[ending]
    with _asking(rig, inline=inline, stream=stream) as client:
        wait_until(lambda: seen)
        assert client.recv(65536)
    wait_until(lambda: rig.proxy.drain.in_flight == 0)
    assert seen == [0]
    seen.clear()
    with _asking(rig, inline=inline, stream=stream):
        wait_until(lambda: len(backend.requests) == 2)
    wait_until(lambda: rig.proxy.drain.in_flight == 0)
    assert seen == [0]
    breaker = rig.proxy.services.backends.all[0].breaker
    if well:
        assert breaker.failures == 0
    elif ending not in ("no end", "refused in a stream"):
        assert breaker.failures


def test_a_place_is_free_once() -> None:
    backend = Fleet(1).all[0]
    with Turn(backend) as turn:
        assert backend.outstanding == 1
        turn.free()
        turn.free()
        assert backend.outstanding == 0
        turn.finished()
        turn.close()
    assert backend.outstanding == 0


def test_a_free_place_is_not_the_last_word() -> None:
    """The one request that tries a backend out has its last byte before it has said how it went: until then nobody else
    tries, and then it counts."""
    fleet = Fleet(1)
    backend = fleet.all[0]
    fleet.fail(backend)
    fleet.clock.now += 1000
    with Turn(backend) as turn:
        turn.free()
        assert backend.breaker.state == "half_open"
        assert not backend.breaker.admits(fleet.clock.now)
        turn.finished()
    assert (backend.breaker.state, backend.breaker.failures) == ("closed", 0)
