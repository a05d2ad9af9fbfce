"""Backends that die, hang, fail, are busy and come back, behind a running proxy."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import aiohttp
import httpx
import pytest

from policies.settings import hash_key
from tests.proxy.conftest import CHAT, Rig
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, Step, Until
from tests.support.raw_http import Call
from tests.support.valkey import Valkey

QUICK = {"failures": 3, "open_seconds": 0.3, "longest": 0.6}
ERROR = wire.whole(b'{"error": {"message": "broken"}}', 500)
BUSY = b"HTTP/1.1 429 X\r\ncontent-type: application/json\r\nretry-after: %s\r\ncontent-length: 2\r\n\r\n{}"
KEYS = [
    {"name": "ann", "sha256": hash_key("sk-ann")},
    {"name": "root", "sha256": hash_key("sk-root"), "admin": True},
]
ANN, ROOT = ({"authorization": f"Bearer sk-{name}"} for name in ("ann", "root"))


@pytest.fixture(autouse=True)
def _empty(valkey: Valkey) -> None:
    with valkey.client() as client:
        client.flushall()


@pytest.fixture
def third() -> Iterator[FakeBackend]:
    with FakeBackend() as server:
        yield server


@pytest.fixture
def trio(
    make_rig: Callable[..., Rig], backend: FakeBackend, second: FakeBackend, third: FakeBackend
) -> Callable[..., tuple[Rig, list[FakeBackend]]]:
    """Makes a rig with three backends that answer."""

    def make(**sections: Any) -> tuple[Rig, list[FakeBackend]]:
        rig = make_rig(second.url, third.url, **{"breaker": QUICK} | sections)
        servers = [backend, second, third]
        for server in servers:
            server.script = [wire.whole(wire.BODY)]
        return rig, servers

    return make


def _took(servers: list[FakeBackend]) -> list[int]:
    return [len(server.requests) for server in servers]


def _reset(servers: list[FakeBackend]) -> None:
    for server in servers:
        server.requests.clear()


def _breaker(rig: Rig, at: int = 0) -> str:
    return rig.proxy.services.backends.all[at].breaker.state


def _until(condition: Callable[[], object], timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ([ERROR], "status"),
        ([Close()], "disconnected"),
        ([Close(reset=True)], "disconnected"),
        ([wire.whole(wire.BODY)[:-30], Close()], "broken"),
        ([5.0], "timeout"),
        ([wire.whole(wire.BODY)[:60], 5.0], "timeout"),
    ],
)
def test_one_that_fails_is_left_alone_and_comes_back(
    trio: Callable[..., tuple[Rig, list[FakeBackend]]], script: list[Step], kind: str
) -> None:
    rig, servers = trio(timeouts={"first_byte": 0.15})
    servers[0].script = script
    statuses = [rig.chat().status_code for _ in range(12)]
    # An answer that broke off half-way was asked for elsewhere, too: nothing of it had been sent.
    assert statuses == [200] * 12
    assert rig.proxy.services.backends.all[0].failure is not None
    assert rig.proxy.services.backends.all[0].failure.kind == kind
    assert _breaker(rig) == "open"
    assert 3 <= len(servers[0].requests) <= 4
    _reset(servers)
    servers[0].script = [wire.whole(wire.BODY)]
    time.sleep(0.6)
    assert [rig.chat().status_code for _ in range(9)] == [200] * 9
    assert _breaker(rig) == "closed"
    assert _took(servers) == [3, 3, 3]


def test_one_that_dies_and_comes_back(make_rig: Callable[..., Rig], second: FakeBackend) -> None:
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
    assert _breaker(rig, 1) == "open"
    rig.proxy.services.backends.all[1].rest(0)
    with FakeBackend([wire.whole(wire.BODY)], port=port) as alive:
        _until(lambda: rig.chat().status_code == 200 and alive.requests)
        assert _breaker(rig, 1) == "closed"


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
    assert rig.open_ids() == []


def test_one_request_tries_one_that_was_silent(make_rig: Callable[..., Rig], backend: FakeBackend) -> None:
    rig = make_rig(timeouts={"first_byte": 1.5}, breaker={"failures": 2, "open_seconds": 0.4, "longest": 0.4})
    backend.script = [5.0]
    for _ in range(2):
        assert rig.chat().status_code == 504
    assert rig.chat().status_code == 503
    assert len(backend.requests) == 2
    over = threading.Event()
    backend.script = [Until(over), wire.whole(wire.BODY)]
    time.sleep(0.4)
    with ThreadPoolExecutor(10) as pool:
        calls = [pool.submit(rig.chat) for _ in range(10)]
        _until(lambda: sum(call.done() for call in calls) == 9)
        assert len(backend.requests) == 3
        over.set()
        statuses = sorted(call.result().status_code for call in calls)
    assert statuses == [200] + [503] * 9
    assert _breaker(rig) == "closed"
    assert rig.chat().status_code == 200


def test_all_of_them_fail_by_what_they_answer(rig: Rig) -> None:
    """A client gets what the backend says, as without a proxy, and an answer as soon as there is one."""
    rig.backend.script = [ERROR]
    for _ in range(10):
        answer = rig.chat()
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "broken")
    assert _breaker(rig) == "open"
    rig.backend.script = [wire.whole(wire.BODY)]
    assert rig.chat().status_code == 200
    assert _breaker(rig) == "closed"


def test_nobody_is_shut_out_by_one_whose_requests_break_every_backend(
    trio: Callable[..., tuple[Rig, list[FakeBackend]]],
) -> None:
    rig, servers = trio(breaker={"failures": 3, "open_seconds": 60})

    def script(request: Any) -> list[Step]:
        return [ERROR if b"poison" in request.body else wire.whole(wire.BODY)]

    for server in servers:
        server.script = script
    for _ in range(10):
        assert rig.chat(user="poison").status_code == 500
    assert [_breaker(rig, n) for n in range(3)] == ["open"] * 3
    assert [rig.chat().status_code for _ in range(6)] == [200] * 6


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_4xx_are_the_requests_own(trio: Callable[..., tuple[Rig, list[FakeBackend]]], status: int) -> None:
    rig, servers = trio()
    servers[0].script = [wire.whole(b'{"error": {"message": "no"}}', status)]
    for _ in range(30):
        rig.chat()
    assert _breaker(rig) == "closed"
    assert _took(servers) == [10, 10, 10]


def test_a_busy_one_rests_as_long_as_it_wants(trio: Callable[..., tuple[Rig, list[FakeBackend]]]) -> None:
    rig, servers = trio()
    servers[0].script = [BUSY % b"1"]
    assert [rig.chat().status_code for _ in range(10)] == [200] * 10
    assert len(servers[0].requests) == 1
    assert _breaker(rig) == "closed"
    servers[0].script = [wire.whole(wire.BODY)]
    time.sleep(1.0)
    assert [rig.chat().status_code for _ in range(9)] == [200] * 9
    assert len(servers[0].requests) == 4


def test_the_only_one_says_itself_that_it_is_busy(rig: Rig) -> None:
    rig.backend.script = [BUSY % b"17"]
    for _ in range(8):
        answer = rig.chat()
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "17")
    assert len(rig.backend.requests) == 8


def test_streams_that_break_off_half_way_count(trio: Callable[..., tuple[Rig, list[FakeBackend]]]) -> None:
    rig, servers = trio()
    for server in servers:
        server.script = wire.stream()
    servers[0].script = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:2]), Close()]
    for _ in range(12):
        rig.chat(stream=True)
    backend = rig.proxy.services.backends.all[0]
    assert (backend.breaker.state, backend.breaker.kind) == ("open", "broken")
    assert len(servers[0].requests) == 3


def test_errors_within_a_stream_count(trio: Callable[..., tuple[Rig, list[FakeBackend]]]) -> None:
    rig, servers = trio()
    for server in servers:
        server.script = wire.stream()
    said = b'data: {"error": {"message": "engine died", "code": 500}}\n\n'
    servers[0].script = [wire.SSE_HEAD, *map(wire.chunk, [*wire.FRAMES[:2], said]), wire.chunk(b"")]
    for _ in range(12):
        rig.chat(stream=True)
    assert _breaker(rig) == "open"


def test_streams_that_begin_with_an_error_count(trio: Callable[..., tuple[Rig, list[FakeBackend]]]) -> None:
    rig, servers = trio()
    for server in servers:
        server.script = wire.stream()
    said = b'data: {"error": {"message": "engine died", "code": 500}}\n\n'
    servers[0].script = [wire.SSE_HEAD, wire.chunk(said), wire.chunk(b"")]
    assert [rig.chat(stream=True).status_code for _ in range(12)] == [200] * 12
    assert _breaker(rig) == "open"


def test_streams_that_fall_silent_count(trio: Callable[..., tuple[Rig, list[FakeBackend]]]) -> None:
    rig, servers = trio(timeouts={"idle": 0.1})
    for server in servers:
        server.script = wire.stream()
    servers[0].script = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:2]), 5.0]
    for _ in range(12):
        rig.chat(stream=True)
    assert rig.proxy.services.backends.all[0].breaker.kind == "timeout"


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_never_count(trio: Callable[..., tuple[Rig, list[FakeBackend]]], stream: bool) -> None:
    rig, servers = trio()
    for server in servers:
        server.script = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:2]), 5.0] if stream else [5.0]
    for n in range(30):
        call = Call(rig.proxy.url, "/v1/chat/completions", json.dumps(CHAT | {"stream": stream}).encode(), {})
        _until(lambda n=n: sum(_took(servers)) == n + 1)  # type: ignore[misc]
        call.leave()
    _until(lambda: all(backend.outstanding == 0 for backend in rig.proxy.services.backends.all))
    for backend in rig.proxy.services.backends.all:
        assert (backend.breaker.state, backend.breaker.failures, backend.failure) == ("closed", 0, None)


def test_the_total_time_out_counts_against_nobody(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(timeouts={"total": 0.1}, breaker=QUICK)
    rig.backend.script = [5.0]
    for _ in range(5):
        assert rig.chat().status_code == 504
    assert _breaker(rig) == "closed"


def test_one_that_hangs_stalls_no_other(trio: Callable[..., tuple[Rig, list[FakeBackend]]]) -> None:
    rig, servers = trio()
    over = threading.Event()
    servers[0].script = [Until(over), wire.whole(wire.BODY)]
    with ThreadPoolExecutor(16) as pool:
        try:
            calls = [pool.submit(rig.chat) for _ in range(200)]
            # It has its third of what is in flight at once, and no more.
            _until(lambda: sum(call.done() for call in calls) >= 192)
            assert len(servers[0].requests) <= 8
        finally:
            over.set()
        assert all(call.result().status_code == 200 for call in calls)


async def test_a_thousand_requests_spread_evenly(trio: Callable[..., tuple[Rig, list[FakeBackend]]]) -> None:
    rig, servers = trio()
    over = threading.Event()
    for server in servers:
        server.script = [Until(over), wire.whole(wire.BODY)]

    async def one(session: aiohttp.ClientSession) -> int:
        async with session.post(f"{rig.proxy.url}/v1/chat/completions", json=CHAT) as response:
            await response.read()
            return response.status

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [asyncio.create_task(one(session)) for _ in range(1000)]
        async with asyncio.timeout(30):
            while sum(_took(servers)) < 1000:  # noqa: ASYNC110 - the servers have threads of their own
                await asyncio.sleep(0.02)
        try:
            assert sorted(_took(servers)) == [333, 333, 334]
            assert sorted(backend.outstanding for backend in rig.proxy.services.backends.all) == [333, 333, 334]
        finally:
            over.set()
        assert Counter(await asyncio.gather(*tasks)) == {200: 1000}
    assert [backend.outstanding for backend in rig.proxy.services.backends.all] == [0, 0, 0]


def test_prompts_that_begin_alike_stay_together(trio: Callable[..., tuple[Rig, list[FakeBackend]]]) -> None:
    rig, servers = trio(routing={"policy": "prefix_hash"})
    for topic in range(12):
        _reset(servers)
        talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Topic {topic}"}]
        for _ in range(3):
            assert rig.chat(messages=talk).status_code == 200
            talk += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
        assert sorted(_took(servers)) == [0, 0, 3]
    _reset(servers)
    for n in range(30):
        assert rig.http.post("/v1/completions", json={"model": "m", "prompt": f"{n}"}).status_code == 200
    assert all(_took(servers))
    _reset(servers)
    for n in range(6):
        assert rig.http.post("/v1/embeddings", json={"model": "m", "input": f"{n}", "user": "u"}).status_code == 200
    assert sorted(_took(servers)) == [0, 0, 6]


def test_requests_wait_a_moment_for_a_place(make_rig: Callable[..., Rig], backend: FakeBackend) -> None:
    crowded = {"name": "b1", "url": backend.url, "model": "m", "max_concurrency": 2}
    rig = make_rig(backends=[crowded], routing={"queue": 50}, keys=KEYS)
    backend.script = [0.02, wire.whole(wire.BODY)]
    most = 0

    def watch() -> int:
        nonlocal most
        most = max(most, backend.busy)
        return most

    with ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(rig.chat, headers=ANN) for _ in range(40)]
        while not all(call.done() for call in calls):
            watch()
            time.sleep(0.001)
    assert [call.result().status_code for call in calls] == [200] * 40
    assert most == 2
    page = rig.http.get("/metrics", headers=ROOT).text
    assert 'countersign_queue_wait_duration_seconds_count{model="m"}' in page
    assert 'countersign_queued{model="m"} 0.0' in page


def test_a_full_queue_is_refused_at_once_and_a_long_wait_after_its_time(
    make_rig: Callable[..., Rig], backend: FakeBackend
) -> None:
    crowded = {"name": "b1", "url": backend.url, "model": "m", "max_concurrency": 1}
    rig = make_rig(backends=[crowded], routing={"queue": 1, "queue_seconds": 0.4})
    over = threading.Event()
    backend.script = [Until(over), wire.whole(wire.BODY)]
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(rig.chat)
        _until(lambda: backend.requests)
        started = time.monotonic()
        second = pool.submit(rig.chat)
        _until(lambda: rig.proxy.services.backends.groups["m"].waiting)
        assert rig.chat().status_code == 503
        assert time.monotonic() - started < 0.35
        refused = second.result()
        assert 0.35 < time.monotonic() - started < 3
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "backend_unavailable"
        over.set()
        assert first.result().status_code == 200
    assert len(backend.requests) == 1


def test_who_leaves_the_queue_is_forgotten(make_rig: Callable[..., Rig], backend: FakeBackend) -> None:
    crowded = {"name": "b1", "url": backend.url, "model": "m", "max_concurrency": 1}
    rig = make_rig(backends=[crowded])
    over = threading.Event()
    backend.script = [Until(over), wire.whole(wire.BODY)]
    waiting = rig.proxy.services.backends.groups["m"].waiting
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(rig.chat)
        _until(lambda: backend.requests)
        call = Call(rig.proxy.url, "/v1/chat/completions", json.dumps(CHAT).encode(), {})
        _until(lambda: waiting)
        call.leave()
        _until(lambda: not waiting)
        over.set()
        assert first.result().status_code == 200
    assert len(backend.requests) == 1
    assert rig.proxy.drain.in_flight == 0


def test_probes_decide_who_is_asked_and_never_end_the_service(
    make_rig: Callable[..., Rig], backend: FakeBackend, second: FakeBackend
) -> None:
    def unwell(request: Any) -> list[Step]:
        return [wire.whole(b"", 503)] if request.line.startswith(b"GET") else [wire.whole(wire.BODY)]

    def well(request: Any) -> list[Step]:
        return [wire.whole(wire.BODY)]

    def took(server: FakeBackend) -> int:
        return sum(request.line.startswith(b"POST") for request in server.requests)

    backend.script, second.script = unwell, well
    rig = make_rig(second.url, health={"interval": 0.05, "down_after": 2, "up_after": 2}, keys=KEYS)
    first, other = rig.proxy.services.backends.all
    _until(lambda: not first.up)
    assert [rig.chat(headers=ANN).status_code for _ in range(6)] == [200] * 6
    assert (took(backend), took(second)) == (0, 6)
    second.script = unwell
    _until(lambda: not other.up)
    # Nobody is well: better than nothing.
    assert [rig.chat(headers=ANN).status_code for _ in range(6)] == [200] * 6
    assert (took(backend), took(second)) == (3, 9)
    backend.script = well
    _until(lambda: first.up)
    assert [rig.chat(headers=ANN).status_code for _ in range(4)] == [200] * 4
    assert (took(backend), took(second)) == (7, 9)
    page = rig.http.get("/metrics", headers=ROOT).text
    assert 'countersign_backend_up{backend="b1",model="m"} 1.0' in page
    assert 'countersign_backend_up{backend="b2",model="m"} 0.0' in page
    assert 'countersign_backend_probes_total{backend="b2",result="status_503"}' in page


def test_what_is_shown(trio: Callable[..., tuple[Rig, list[FakeBackend]]]) -> None:
    rig, servers = trio(breaker=QUICK | {"open_seconds": 30, "longest": 30}, keys=KEYS)
    servers[0].script = [ERROR]
    servers[1].script = [BUSY % b"30"]
    for _ in range(12):
        assert rig.chat(headers=ANN).status_code == 200
    b1, b2, b3 = rig.http.get("/v1/backends", headers=ROOT).json()["data"]
    health = b1["health"]
    assert health["breaker"]["state"] == "open"
    assert 20 < health["breaker"]["tried_in"] <= 30
    assert health["last_failure"]["kind"] == "status"
    assert b2["health"]["breaker"]["state"] == "closed"
    assert 20 < b2["health"]["resting"] <= 30
    assert b3["health"] == {
        "up": True,
        "resting": 0.0,
        "breaker": {"state": "closed", "failures": 0, "tried_in": None},
        "last_failure": None,
        "last_probe_failure": None,
    }
    assert (b3["outstanding"], b3["max_concurrency"]) == (0, 0)
    page = rig.http.get("/metrics", headers=ROOT).text
    assert 'countersign_backend_breaker{backend="b1",model="m",state="open"} 1.0' in page
    assert 'countersign_backend_outstanding{backend="b3",model="m"} 0.0' in page
    assert 'countersign_asked_another_total{backend="b1",model="m",reason="status_500"} 3.0' in page
    assert 'countersign_asked_another_total{backend="b2",model="m",reason="status_429"} 1.0' in page
    for headers in ({}, ANN):
        public = rig.http.get("/metrics", headers=headers).text
        assert "asked_another" in public
        assert "breaker" not in public
        assert "outstanding" not in public


def _split(line: str) -> tuple[str, str]:
    name, _, value = line.partition(": ")
    return name, value


def _hinted(rig: Rig, path: str, *lines: str) -> httpx.Response:
    """A POST with these header lines as they are."""
    body = json.dumps(CHAT | {"prompt": "x", "input": "x"}).encode()
    call = httpx.Request(
        "POST",
        rig.proxy.url + path,
        content=body,
        headers=[
            ("content-type", "application/json"),
            *map(_split, lines),
        ],
    )
    return rig.http.send(call)


PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"]


@pytest.mark.parametrize("path", PATHS)
def test_hints(trio: Callable[..., tuple[Rig, list[FakeBackend]]], path: str) -> None:
    rig, servers = trio(keys=KEYS)
    ann, root = "authorization: Bearer sk-ann", "authorization: Bearer sk-root"
    for name in ("x-countersign-backend", "X-Countersign-Backend", "X-COUNTERSIGN-BACKEND"):
        assert _hinted(rig, path, root, f"{name}: b3").status_code == 200
        for wish in ("b3", "b9", ""):
            assert _hinted(rig, path, ann, f"{name}: {wish}").status_code == 400
    assert _took(servers) == [0, 0, 3]
    for wrong in ("b9", "", "b3,b1", "B3", "b1 b3"):
        assert _hinted(rig, path, root, f"x-countersign-backend: {wrong}").status_code == 400
    twice = ["x-countersign-backend: b1", "X-Countersign-Backend: b3"]
    for lines in (twice, twice[::-1], twice[:1] * 2):
        assert _hinted(rig, path, root, *lines).status_code == 400
        assert _hinted(rig, path, ann, *lines).status_code == 400
    assert _took(servers) == [0, 0, 3]
    for server in servers:
        for request in server.requests:
            assert b"countersign-backend" not in request.raw_headers.lower()
            assert b"b3" not in request.raw_headers


def test_a_hint_is_followed_to_one_that_is_out(trio: Callable[..., tuple[Rig, list[FakeBackend]]]) -> None:
    rig, servers = trio(keys=KEYS, breaker=QUICK | {"open_seconds": 60, "longest": 60})
    to_first = ROOT | {"x-countersign-backend": "b1"}
    servers[0].script = [Close()]
    for _ in range(6):
        assert rig.chat(headers=to_first).status_code == 502
    assert _breaker(rig) == "open"
    assert len(servers[0].requests) == 6
    assert rig.chat(headers=ANN).status_code == 200
    assert len(servers[0].requests) == 6
    rig.stand("b1", "quarantined")
    servers[0].script = [wire.whole(wire.BODY)]
    assert rig.chat(headers=to_first).status_code == 200
    assert _breaker(rig) == "closed"
    _reset(servers)
    assert [rig.chat(headers=ANN).status_code for _ in range(4)] == [200] * 4
    assert _took(servers)[0] == 0


def test_a_hint_to_a_full_one_waits_and_is_refused(
    make_rig: Callable[..., Rig], backend: FakeBackend, second: FakeBackend
) -> None:
    entries = [
        {"name": name, "url": server.url, "model": "m", "max_concurrency": 1}
        for name, server in (("b1", backend), ("b2", second))
    ]
    rig = make_rig(backends=entries, routing={"queue_seconds": 0.2})
    over = threading.Event()
    backend.script, second.script = [Until(over), wire.whole(wire.BODY)], [wire.whole(wire.BODY)]
    to_first = {"x-countersign-backend": "b1"}
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        stack.callback(over.set)
        first = pool.submit(rig.chat, headers=to_first)
        _until(lambda: backend.requests)
        assert rig.chat(headers=to_first).status_code == 503
        assert rig.chat().status_code == 200
        over.set()
        assert first.result().status_code == 200
    assert (len(backend.requests), len(second.requests)) == (1, 1)
