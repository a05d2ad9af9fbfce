"""Backends that die, hang, fail, are busy and come back, behind a running proxy."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.proxy.backends.fleet import Clock
from tests.proxy.backends.live import BUSY, ERROR, QUICK, Trio, breaker_of, reset, took
from tests.proxy.conftest import CHAT, Rig
from tests.support import wire
from tests.support.deadlines import Deadlines
from tests.support.fake_backend import Close, FakeBackend, PeerCloses, Step, Until
from tests.support.raw_http import Call
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("empty")


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ([ERROR], "status"),
        ([Close()], "disconnected"),
        ([Close(reset=True)], "disconnected"),
        ([wire.whole(wire.BODY)[:-30], Close()], "broken"),
        ([], "timeout"),
        ([wire.whole(wire.BODY)[:60]], "timeout"),
    ],
)
def test_one_that_fails_is_left_alone_and_comes_back(
    clock: Clock, deadlines: Deadlines, trio: Trio, script: list[Step], kind: str
) -> None:
    rig, servers = trio()
    servers[0].script = deadlines.silence(*script) if kind == "timeout" else script
    statuses = [rig.chat().status_code for _ in range(12)]
    # An answer that broke off half-way was asked for elsewhere, too: nothing of it had been sent.
    assert statuses == [200] * 12
    assert rig.proxy.services.backends.all[0].failure is not None
    assert rig.proxy.services.backends.all[0].failure.kind == kind
    assert breaker_of(rig) == "open"
    assert 3 <= len(servers[0].requests) <= 4
    reset(servers)
    servers[0].script = [wire.whole(wire.BODY)]
    clock.now += QUICK["longest"]
    assert [rig.chat().status_code for _ in range(9)] == [200] * 9
    assert breaker_of(rig) == "closed"
    assert took(servers) == [3, 3, 3]


def test_one_that_dies_and_comes_back(clock: Clock, make_rig: Callable[..., Rig], second: FakeBackend) -> None:
    with FakeBackend([wire.whole(wire.BODY)]) as dying:
        port = dying.port
        rig = make_rig(
            backends=[
                {"name": "b1", "url": second.url, "model": "m"},
                {"name": "b2", "url": dying.url, "model": "m"},
            ],
            breaker=QUICK,
        )
        second.script = [wire.whole(wire.BODY)]
        assert [rig.chat().status_code for _ in range(4)] == [200] * 4
        assert len(dying.requests) == 2
    assert [rig.chat().status_code for _ in range(12)] == [200] * 12
    assert rig.proxy.services.backends.all[1].breaker.failures == 1
    page = rig.http.get("/metrics").text
    assert 'countersign_asked_another_total{backend="b2",model="m",reason="unreachable"} 1.0' in page
    for _ in range(3):
        assert rig.chat(headers={"x-countersign-backend": "b2"}).status_code == 503
    assert breaker_of(rig, 1) == "open"
    rig.proxy.services.backends.all[1].rest(0)
    clock.now += QUICK["longest"]
    with FakeBackend([wire.whole(wire.BODY)], port=port) as alive:
        wait_until(lambda: rig.chat().status_code == 200 and alive.requests)
        assert breaker_of(rig, 1) == "closed"


def test_none_left_is_said_at_once_and_when_to_come_again(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(
        backends=[{"name": "b1", "url": "http://127.0.0.1:9", "model": "m"}],
        breaker={"failures": 2, "open_seconds": 30},
    )
    for _ in range(2):
        assert rig.chat().headers["retry-after"] == "1"
    refused = rig.chat(headers={"x-request-id": "mine"})
    assert refused.status_code == 503
    assert 20 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-request-id"] == "mine"
    assert refused.json()["error"]["code"] == "backend_unavailable"
    assert "x-countersign-id" not in refused.headers
    wait_until(lambda: rig.open_ids() == [])


def test_one_request_tries_one_that_was_silent(
    clock: Clock, deadlines: Deadlines, make_rig: Callable[..., Rig], backend: FakeBackend
) -> None:
    rig = make_rig(breaker={"failures": 2, "open_seconds": 0.4, "longest": 0.4})
    backend.script = deadlines.silence()
    for _ in range(2):
        assert rig.chat().status_code == 504
    assert rig.chat().status_code == 503
    assert len(backend.requests) == 2
    over = threading.Event()
    backend.script = [Until(over), wire.whole(wire.BODY)]
    clock.now += 0.4
    with ThreadPoolExecutor(10) as pool:
        calls = [pool.submit(rig.chat) for _ in range(10)]
        wait_until(lambda: sum(call.done() for call in calls) == 9)
        wait_until(lambda: len(backend.requests) == 3)
        over.set()
        statuses = sorted(call.result().status_code for call in calls)
    assert statuses == [200] + [503] * 9
    assert breaker_of(rig) == "closed"
    assert rig.chat().status_code == 200


def test_all_of_them_fail_by_what_they_answer(rig: Rig) -> None:
    """A client gets what the backend says, as without a proxy, and an answer as soon as there is one."""
    rig.backend.script = [ERROR]
    for _ in range(10):
        answer = rig.chat()
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "broken")
    assert breaker_of(rig) == "open"
    rig.backend.script = [wire.whole(wire.BODY)]
    assert rig.chat().status_code == 200
    assert breaker_of(rig) == "closed"


def test_nobody_is_shut_out_by_one_whose_requests_break_every_backend(
    trio: Trio,
) -> None:
    rig, servers = trio(breaker={"failures": 3, "open_seconds": 60})

    def script(request: Any) -> list[Step]:
        return [ERROR if b"poison" in request.body else wire.whole(wire.BODY)]

    for server in servers:
        server.script = script
    for _ in range(10):
        assert rig.chat(user="poison").status_code == 500
    assert [breaker_of(rig, n) for n in range(3)] == ["open"] * 3
    assert [rig.chat().status_code for _ in range(6)] == [200] * 6


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_4xx_are_the_requests_own(trio: Trio, status: int) -> None:
    rig, servers = trio()
    servers[0].script = [wire.whole(b'{"error": {"message": "no"}}', status)]
    for _ in range(30):
        rig.chat()
    assert breaker_of(rig) == "closed"
    assert took(servers) == [10, 10, 10]


def test_a_busy_one_rests_as_long_as_it_wants(clock: Clock, trio: Trio) -> None:
    rig, servers = trio()
    servers[0].script = [BUSY % b"1"]
    assert [rig.chat().status_code for _ in range(10)] == [200] * 10
    assert len(servers[0].requests) == 1
    assert breaker_of(rig) == "closed"
    servers[0].script = [wire.whole(wire.BODY)]
    clock.now += 1.0
    assert [rig.chat().status_code for _ in range(9)] == [200] * 9
    assert len(servers[0].requests) == 4


def test_the_only_one_says_itself_that_it_is_busy(rig: Rig) -> None:
    rig.backend.script = [BUSY % b"17"]
    for _ in range(8):
        answer = rig.chat()
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "17")
    assert len(rig.backend.requests) == 8


def test_streams_that_break_off_half_way_count(clock: Clock, trio: Trio) -> None:
    rig, servers = trio()
    for server in servers:
        server.script = wire.stream()
    servers[0].script = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:2]), Close()]
    for _ in range(12):
        rig.chat(stream=True)
    backend = rig.proxy.services.backends.all[0]
    assert (backend.breaker.state, backend.breaker.kind) == ("open", "broken")
    assert len(servers[0].requests) == 3


def test_errors_within_a_stream_count(clock: Clock, trio: Trio) -> None:
    rig, servers = trio()
    for server in servers:
        server.script = wire.stream()
    said = b'data: {"error": {"message": "engine died", "code": 500}}\n\n'
    servers[0].script = [wire.SSE_HEAD, *map(wire.chunk, [*wire.FRAMES[:2], said]), wire.chunk(b"")]
    for _ in range(12):
        rig.chat(stream=True)
    assert breaker_of(rig) == "open"


def test_streams_that_begin_with_an_error_count(clock: Clock, trio: Trio) -> None:
    rig, servers = trio()
    for server in servers:
        server.script = wire.stream()
    said = b'data: {"error": {"message": "engine died", "code": 500}}\n\n'
    servers[0].script = [wire.SSE_HEAD, wire.chunk(said), wire.chunk(b"")]
    assert [rig.chat(stream=True).status_code for _ in range(12)] == [200] * 12
    assert breaker_of(rig) == "open"


def test_streams_that_fall_silent_count(trio: Trio) -> None:
    rig, servers = trio(timeouts={"idle": 0.1})
    for server in servers:
        server.script = wire.stream()
    servers[0].script = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:2]), 5.0]
    for _ in range(12):
        rig.chat(stream=True)
    assert rig.proxy.services.backends.all[0].breaker.kind == "timeout"


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_never_count(trio: Trio, stream: bool) -> None:
    rig, servers = trio()
    for server in servers:
        begun: list[Step] = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:2])]
        server.script = [*begun, PeerCloses()] if stream else [PeerCloses()]
    for n in range(30):
        call = Call(rig.proxy.url, "/v1/chat/completions", json.dumps(CHAT | {"stream": stream}).encode(), {})
        wait_until(lambda n=n: sum(took(servers)) == n + 1)  # type: ignore[misc]
        call.leave()
    wait_until(lambda: all(backend.outstanding == 0 for backend in rig.proxy.services.backends.all))
    for backend in rig.proxy.services.backends.all:
        assert (backend.breaker.state, backend.breaker.failures, backend.failure) == ("closed", 0, None)


def test_the_total_time_out_counts_against_nobody(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(timeouts={"total": 0.1}, breaker=QUICK)
    rig.backend.script = [5.0]
    for _ in range(5):
        assert rig.chat().status_code == 504
    assert breaker_of(rig) == "closed"
