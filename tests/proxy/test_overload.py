"""Answers that fill the memory of a proxy: the backend that sends them loses them, nobody else does."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from policies import coverage
from proxy.relay.exchange import Exchange
from tests.proxy.conftest import CHAT, Rig
from tests.proxy.raw import POST
from tests.support import wire
from tests.support.fake_backend import FakeBackend, PeerCloses, Step
from tests.support.waiting import PATIENCE, wait_until

_MIB = 1024 * 1024
MOST = 32 * _MIB
HOSTILE = 20
LONG = [*wire.FRAMES[:1], *[wire.CONTENT[0]] * 1200, *wire.FRAMES[4:]]
"""So many tokens that it is looked at more than once how much of them is held."""


def _begin(rig: Rig, *, stream: bool) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", rig.proxy.port), timeout=PATIENCE)
    body = json.dumps(CHAT | {"model": "h", "stream": stream}).encode()
    client.sendall(POST + b"host: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    return client


def _endless(kind: str) -> list[Step]:
    """An answer of four megabytes that does not end."""
    if kind == "body":
        start = [wire.head(200, "application/json", "transfer-encoding: chunked"), wire.chunk(b'{"a":"')]
    else:
        said = [wire.chunk(frame) for frame in wire.FRAMES[:3]] if kind == "later line" else []
        start = [wire.SSE_HEAD, *said, wire.chunk(b'data: "')]
    return [*start, *[wire.chunk(b"x" * _MIB)] * 4, wire.chunk(b"x"), PeerCloses()]


@pytest.mark.parametrize("kind", ["line", "later line", "body"])
def test_a_backend_that_fills_memory_harms_itself_alone(
    make_rig: Callable[..., Rig], backend: FakeBackend, second: FakeBackend, kind: str
) -> None:
    """Before, each answer halved what was left, until nobody's answer of a megabyte came through."""
    urls = {"h": second.url, "m": backend.url}
    backends = [{"name": f"of-{model}", "url": url, "model": model} for model, url in urls.items()]
    models = {"m": {"vocab_size": 1000}, "h": {"vocab_size": 1000}}
    rig = make_rig(backends=backends, models=models, bounds={"held_bytes": MOST}, breaker={"failures": 100})
    second.script = _endless(kind)
    rig.backend.script = wire.stream(LONG)
    holding = rig.proxy.services.holding
    with ExitStack() as stack:
        for _ in range(HOSTILE):
            stack.enter_context(_begin(rig, stream=kind != "body"))
        wait_until(lambda: holding.held > MOST - 5 * _MIB)
        for _ in range(3):
            answer = rig.chat(stream=True)
            assert answer.content.endswith(wire.DONE)
            assert answer.content.count(b"data: ") == len(LONG) - 1  # less the usage, which was not asked for
            recorded = rig.recorded(answer.headers["x-countersign-id"])
            assert isinstance(recorded, list)
            assert recorded[0].faults == ()
        assert holding.held <= MOST
        assert [each.breaker.failures for each in rig.proxy.services.backends.all] == [0, 0]
    wait_until(lambda: holding.shares == 0)


@pytest.mark.parametrize("kind", ["line", "later line", "body"])
def test_an_answer_that_gives_way_is_nobodys_fault(make_rig: Callable[..., Rig], kind: str) -> None:
    rig = make_rig(bounds={"held_bytes": 3 * _MIB}, breaker={"failures": 1})
    rig.backend.script = _endless(kind)
    answer = rig.chat(stream=kind != "body")
    recorded = rig.recorded(answer.headers["x-countersign-id"])
    assert isinstance(recorded, list)
    (evidence,) = recorded
    assert evidence.faults == ("proxy_overloaded",)
    assert coverage.blame_of(*evidence.faults) == coverage.OURS
    if kind == "later line":
        last = answer.content.removesuffix(b"\n\n").rpartition(b"data: ")[2]
        assert (answer.status_code, json.loads(last)["error"]["code"]) == (200, "overloaded")
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        assert answer.headers["retry-after"] == "1"
    assert rig.backend.last.peer_closed.wait(PATIENCE)
    (backend,) = rig.proxy.services.backends.all
    wait_until(lambda: backend.outstanding == 0)
    assert backend.breaker.failures == 0


@pytest.mark.parametrize(
    ("of_reply", "draining", "status"),
    [
        ({"broken": True}, False, 502),
        ({"broken": True, "timed_out": True}, False, 504),
        ({"broken": True, "given_up": True}, True, 503),
        ({}, False, 499),
        ({}, True, 503),
        # A read that was not over in time by the client's own doing breaks nothing.
        ({"timed_out": True}, False, 499),
    ],
)
def test_what_counts_for_an_answer_whose_end_nobody_heard(
    of_reply: dict[str, bool], draining: bool, status: int
) -> None:
    exchange = Exchange.__new__(Exchange)
    reply = SimpleNamespace(**{"broken": False, "timed_out": False, "given_up": False} | of_reply)
    vars(exchange).update(
        _attempt=SimpleNamespace(reply=reply), _services=SimpleNamespace(drain=SimpleNamespace(over=draining))
    )
    assert exchange._cut_status() == status
