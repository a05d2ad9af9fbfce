"""Cases 1 to 12: clients that leave, connections that leak, keep-alive connections that went stale."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fidelity.frames import BODIES, BODY, STREAM, STREAMS, begun, chat, script
from tests.fidelity.gateway import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Gateway, Gateways
from tests.fidelity.meaning import assert_same
from tests.fidelity.timing import Lateness, assert_mostly
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, PeerCloses, Step, Until
from tests.support.raw_http import Call
from tests.support.waiting import PATIENCE, wait_until

AT_ONCE = 0.1
MORE = (RESPONSES, MESSAGES)
PHASES = {"before headers": 3, "after headers": 3, "mid-stream": 1, "whole, before": 2, "whole, in body": 2}
"""When a client leaves, and the case that is about it."""
LARGE = chat('{"content":"' + "x" * 40_000 + '"}')
HELD_UP = 1.0
"""Seconds that an answer may take while what others left behind is cleared away: reading it is work too."""


def _seconds_until_closed(gateway: Gateway, upstream: FakeBackend, call: Call, *, reset: bool) -> float:
    """How long the upstream's connection outlived the client, less what the machine was late."""
    with Lateness(gateway.pid) as late:
        left = call.leave(reset=reset)
        assert upstream.last.peer_closed.wait(PATIENCE if gateway.ours else 2), "the upstream connection was not closed"
    return upstream.last.peer_closed_at - left - late.seconds


@pytest.mark.cases(8)
@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("phase", [pytest.param(name, marks=pytest.mark.cases(case)) for name, case in PHASES.items()])
@pytest.mark.parametrize(
    "path", [CHAT, COMPLETIONS, *(pytest.param(path, marks=pytest.mark.cases(4)) for path in MORE)]
)
def test_the_upstream_is_closed_when_the_client_leaves(
    gateway: Gateway, upstream: FakeBackend, path: str, phase: str, reset: bool
) -> None:
    scripts: dict[str, list[Step]] = {
        "before headers": [],
        "after headers": [wire.SSE_HEAD],
        "mid-stream": begun(STREAMS[path][:2]),
        "whole, before": [],
        "whole, in body": [wire.whole(BODIES[path])[:-9]],
    }
    upstream.script = [*scripts[phase], PeerCloses()]

    def leaving() -> float:
        upstream.requests.clear()
        call = gateway.call(path, stream=not phase.startswith("whole"))
        wait_until(lambda: upstream.requests and len(upstream.last.sent) == len(scripts[phase]))
        if phase == "mid-stream":
            call.until(b"One")
        elif scripts[phase]:
            time.sleep(0.05)
        return _seconds_until_closed(gateway, upstream, call, reset=reset)

    assert_mostly(leaving, AT_ONCE)


@pytest.mark.cases(5)
def test_nothing_is_left_in_use(gateways: Gateways, upstream: FakeBackend) -> None:
    gateway = gateways.variant("impatient", otherwise="plain")
    shut: list[list[Step]] = [
        [*begun(STREAM[:3]), PeerCloses()],
        [PeerCloses()],
        [*begun(STREAM[:2]), Close()],
        [*begun(STREAM[:2]), Close(reset=True)],
        [wire.whole(BODY)[:-20], Close()],
    ]
    upstream.script = lambda request: shut[len(upstream.requests) % len(shut)]

    def one(number: int) -> None:
        with gateway.call(stream=number % 2 == 0) as call:
            if number % 3:
                time.sleep(0.02)
            else:
                call.answer()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(60)))
    wait_until(lambda: upstream.busy == 0)
    upstream.script = script(STREAM)
    for _ in range(5):
        assert_same(gateway.ask(stream=True).body, b"".join(STREAM))


@pytest.mark.cases(6, 7)
def test_a_reader_that_stalled_and_went_away(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.script = [*begun(STREAM[:1]), *[wire.chunk(LARGE)] * 2000, PeerCloses()]

    def leaving() -> float:
        upstream.requests.clear()
        call = gateway.call(stream=True)
        call.until(b"assistant")
        _stalled(upstream)
        return _seconds_until_closed(gateway, upstream, call, reset=True)

    assert_mostly(leaving, AT_ONCE)
    wait_until(lambda: upstream.busy == 0)


def _stalled(upstream: FakeBackend) -> None:
    """Wait until the upstream cannot send any more."""
    deadline = time.monotonic() + PATIENCE
    before = -1
    while before != len(upstream.last.sent):
        assert time.monotonic() < deadline
        before = len(upstream.last.sent)
        time.sleep(0.3)


@pytest.mark.cases(9)
def test_many_who_leave_at_once_hold_up_nobody(gateway: Gateway, upstream: FakeBackend) -> None:
    large = wire.chunk(LARGE)

    def read(call: Call) -> None:
        got = 0
        for piece in call.pieces():
            got += len(piece)
            if got > 1_000_000:
                break

    def held_up() -> float:
        """The longest that somebody else waited, from when they leave until their streams are cleared away."""
        upstream.script = [*begun(STREAM[:1]), *[large] * (5 * 1024 * 1024 // len(large)), PeerCloses()]
        calls = [gateway.call(stream=True) for _ in range(30)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read, calls))
        upstream.script = [wire.whole(BODY)]
        for call in calls:
            call.leave()
        took = [_seconds_of_an_answer(gateway) for _ in range(10)]
        wait_until(lambda: upstream.busy == 0)
        return max(*took, *(_seconds_of_an_answer(gateway) for _ in range(10)))

    assert_mostly(held_up, HELD_UP, tries=3)


def _seconds_of_an_answer(gateway: Gateway) -> float:
    """How long it takes, less what the machine was late."""
    began = time.monotonic()
    with Lateness(gateway.pid) as late:
        assert_same(gateway.ask().body, BODY)
    return time.monotonic() - began - late.seconds


@pytest.mark.cases(10)
def test_the_upstream_is_read_to_its_last_byte(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.script = script(STREAM, pause=0.15)
    with gateway.call(stream=True) as call:
        call.head()
        time.sleep(0.3)
        answer = call.answer()
    assert_same(answer.body, b"".join(STREAM))
    assert answer.whole
    assert not upstream.last.peer_closed.is_set()


@pytest.mark.cases(11)
@pytest.mark.feature("record")
def test_what_was_served_until_the_client_left_is_recorded(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.script = [*begun(STREAM[:3]), PeerCloses()]
    call = gateway.call(stream=True)
    call.until(b" two")
    call.leave()
    (evidence,) = gateway.evidence(call.head())
    assert (evidence.text, evidence.complete) == ("One two", False)
    assert "client_left" in evidence.faults
    assert evidence.shown_sha256 == hashlib.sha256(b"".join(STREAM[:3])).hexdigest()


@pytest.mark.cases(12)
def test_a_stale_connection_is_replaced(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.queue = [[wire.whole(BODY)], [Close()], [wire.whole(BODY)]]
    assert_same(gateway.ask().body, BODY)
    assert_same(gateway.ask().body, BODY)
    assert len(upstream.requests) == 3
    assert upstream.requests[1].connection != upstream.requests[2].connection


@pytest.mark.cases(12)
def test_many_stale_connections_cost_one_try_more(gateway: Gateway, upstream: FakeBackend) -> None:
    go = threading.Event()
    upstream.script = [Until(go), wire.whole(BODY)]
    calls = [gateway.call() for _ in range(6)]
    wait_until(lambda: len(upstream.requests) == 6)
    go.set()
    for call in calls:
        assert_same(call.answer().body, BODY)
    kept = upstream.connections
    upstream.requests.clear()
    upstream.script = lambda request: [Close()] if request.connection <= kept else [wire.whole(BODY)]
    assert_same(gateway.ask().body, BODY)
    assert len(upstream.requests) <= 2


@pytest.mark.cases(12)
def test_what_was_begun_to_be_answered_is_not_asked_again(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.queue = [[wire.whole(BODY)], [b"HTTP/1.1 200 OK\r\ncontent-t", 0.05, Close()]]
    upstream.script = [wire.whole(BODY)]
    assert_same(gateway.ask().body, BODY)
    answer = gateway.ask()
    assert answer.status == 502
    assert len(upstream.requests) == 2


@pytest.mark.cases(12)
def test_a_fresh_connection_that_closes_is_an_error(gateway: Gateway, upstream: FakeBackend) -> None:
    kept = upstream.connections
    upstream.script = [Close()]
    answer = gateway.ask(stream=True)
    assert answer.status == 502
    assert "error" in answer.json()
    assert len([request for request in upstream.requests if request.connection > kept]) == 1
    assert len(upstream.requests) <= 2


@pytest.mark.cases(12)
def test_a_kept_connection_is_used_again(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.script = lambda request: [wire.whole(BODY)] if b'"stream": true' not in request.body else script(STREAM)
    before = upstream.connections
    for _ in range(6):
        assert gateway.ask(CHAT).status == 200
    assert upstream.connections <= before + 1


@pytest.mark.cases(3)
def test_leaving_while_the_request_is_still_sent(gateway: Gateway, upstream: FakeBackend) -> None:
    call = gateway.call(CHAT, {"content-length": "100000"}, raw=b'{"model"')
    time.sleep(0.1)
    call.socket.shutdown(socket.SHUT_RDWR)
    call.leave()
    upstream.script = [wire.whole(BODY)]
    assert gateway.ask().status == 200
    assert len(upstream.requests) == 1
