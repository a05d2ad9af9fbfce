"""How a running proxy spreads requests: evenly, alike ones together, and in a queue at the limit."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest

from tests.proxy.backends.live import ANN, BUSY, ERROR, KEYS, QUICK, ROOT, Trio, reset, took
from tests.proxy.conftest import CHAT, Rig
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, Step, Until
from tests.support.raw_http import Call
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("empty")


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


def test_a_full_queue_is_refused_at_once(make_rig: Callable[..., Rig], backend: FakeBackend) -> None:
    crowded = {"name": "b1", "url": backend.url, "model": "m", "max_concurrency": 1}
    rig = make_rig(backends=[crowded], routing={"queue": 1, "queue_seconds": 300})
    over = threading.Event()
    backend.script = [Until(over), wire.whole(wire.BODY)]
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(rig.chat)]
        wait_until(lambda: backend.requests)
        calls.append(pool.submit(rig.chat))
        wait_until(lambda: rig.proxy.services.backends.groups["m"].waiting)
        assert rig.chat().status_code == 503
        over.set()
        assert [call.result().status_code for call in calls] == [200, 200]


def test_a_long_wait_is_refused_after_its_time(make_rig: Callable[..., Rig], backend: FakeBackend) -> None:
    crowded = {"name": "b1", "url": backend.url, "model": "m", "max_concurrency": 1}
    rig = make_rig(backends=[crowded], routing={"queue": 1, "queue_seconds": 0.5})
    over = threading.Event()
    backend.script = [Until(over), wire.whole(wire.BODY)]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(rig.chat)
        wait_until(lambda: backend.requests)
        started = time.monotonic()
        refused = rig.chat()
        assert time.monotonic() - started > 0.4
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
        wait_until(lambda: backend.requests)
        call = Call(rig.proxy.url, "/v1/chat/completions", json.dumps(CHAT).encode(), {})
        wait_until(lambda: waiting)
        call.leave()
        wait_until(lambda: not waiting)
        over.set()
        assert first.result().status_code == 200
    assert len(backend.requests) == 1
    assert rig.proxy.drain.in_flight == 0


def test_prompts_that_begin_alike_stay_together(trio: Trio) -> None:
    rig, servers = trio(routing={"policy": "prefix_hash"})
    for topic in range(12):
        reset(servers)
        talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Topic {topic}"}]
        for _ in range(3):
            assert rig.chat(messages=talk).status_code == 200
            talk += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
        assert sorted(took(servers)) == [0, 0, 3]
    reset(servers)
    for n in range(30):
        assert rig.http.post("/v1/completions", json={"model": "m", "prompt": f"{n}"}).status_code == 200
    assert all(took(servers))
    reset(servers)
    for n in range(6):
        assert rig.http.post("/v1/embeddings", json={"model": "m", "input": f"{n}", "user": "u"}).status_code == 200
    assert sorted(took(servers)) == [0, 0, 6]


async def test_a_thousand_requests_spread_evenly(trio: Trio) -> None:
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
            while sum(took(servers)) < 1000:  # noqa: ASYNC110 - the servers have threads of their own
                await asyncio.sleep(0.02)
        try:
            assert sorted(took(servers)) == [333, 333, 334]
            assert sorted(backend.outstanding for backend in rig.proxy.services.backends.all) == [333, 333, 334]
        finally:
            over.set()
        assert Counter(await asyncio.gather(*tasks)) == {200: 1000}
    assert [backend.outstanding for backend in rig.proxy.services.backends.all] == [0, 0, 0]


def test_one_that_hangs_stalls_no_other(trio: Trio) -> None:
    rig, servers = trio()
    over = threading.Event()
    servers[0].script = [Until(over), wire.whole(wire.BODY)]
    with ThreadPoolExecutor(16) as pool:
        try:
            calls = [pool.submit(rig.chat) for _ in range(200)]
            # It has its third of what is in flight at once, and no more.
            wait_until(lambda: sum(call.done() for call in calls) >= 192)
            assert len(servers[0].requests) <= 8
        finally:
            over.set()
        assert all(call.result().status_code == 200 for call in calls)


@pytest.mark.parametrize("policy", ["least_outstanding", "prefix_hash"])
async def test_whatever_happens_nothing_is_left_behind(trio: Trio, policy: str) -> None:
    """Failures of every kind, clients that leave at any moment, full backends: every place is free in the end."""
    chance = random.Random(policy)
    entries: dict[str, Any] = {
        "routing": {"policy": policy, "queue": 5, "queue_seconds": 0.1},
        "timeouts": {"connect": 0.5, "first_byte": 0.3, "idle": 0.3, "total": 5},
        "health": {"interval": 0.1, "timeout": 0.2},
    }
    rig, servers = trio(**entries)
    for backend in rig.proxy.services.backends.all:
        object.__setattr__(backend.settings, "max_concurrency", 6)
    half = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:2])]
    well: list[Step] = [0.01, wire.whole(wire.BODY)]
    scripts: list[Sequence[Step]] = [
        *(well, well, well, well, wire.stream(pause=0.005), wire.stream(pause=0.005)),
        [ERROR],
        [BUSY % b"0.05"],
        [Close()],
        [Close(reset=True)],
        [1.0],
        [*half, Close(reset=True)],
        [*half, 1.0],
        [wire.whole(b'{"error": {"message": "no"}}', 400)],
    ]
    for server in servers:
        server.script = lambda request: chance.choice(scripts)

    async def one(n: int) -> int:
        body = json.dumps(CHAT | {"stream": n % 2 == 0, "user": f"u{n % 7}"}).encode()
        head = ["POST /v1/chat/completions HTTP/1.1", "host: localhost", "connection: close"]
        head += [f"content-length: {len(body)}"] + ["x-countersign-backend: b2"] * (n % 11 == 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.proxy.port)
        try:
            writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
            async with asyncio.timeout(chance.choice([0.02, 0.1, 0.5, 10])):
                answer = await reader.read()
            return int(answer.split(b" ", 2)[1])
        except TimeoutError:
            return 0
        finally:
            writer.close()
            await writer.wait_closed()

    statuses: Counter[int] = Counter()
    for start in range(0, 400, 40):
        statuses.update(await asyncio.gather(*[one(n) for n in range(start, start + 40)]))
    assert set(statuses) <= {0, 200, 400, 429, 500, 502, 503, 504}
    assert statuses[200] > 30
    wait_until(lambda: rig.proxy.drain.in_flight == 0)
    assert [backend.outstanding for backend in rig.proxy.services.backends.all] == [0, 0, 0]
    assert not rig.proxy.services.backends.groups["m"].waiting
    for server in servers:
        server.script = [wire.whole(wire.BODY)]
    # What is left of breakers, rests and probes passes.
    wait_until(lambda: [rig.chat().status_code for _ in range(12)] == [200] * 12)
    soon = time.monotonic() + QUICK["longest"]
    assert all(backend.breaker.admits(soon) for backend in rig.proxy.services.backends.all)


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
    wait_until(lambda: not first.up)
    assert [rig.chat(headers=ANN).status_code for _ in range(6)] == [200] * 6
    assert (took(backend), took(second)) == (0, 6)
    second.script = unwell
    wait_until(lambda: not other.up)
    # Nobody is well: better than nothing.
    assert [rig.chat(headers=ANN).status_code for _ in range(6)] == [200] * 6
    assert (took(backend), took(second)) == (3, 9)
    backend.script = well
    wait_until(lambda: first.up)
    assert [rig.chat(headers=ANN).status_code for _ in range(4)] == [200] * 4
    assert (took(backend), took(second)) == (7, 9)
    page = rig.http.get("/metrics", headers=ROOT).text
    assert 'countersign_backend_up{backend="b1",model="m"} 1.0' in page
    assert 'countersign_backend_up{backend="b2",model="m"} 0.0' in page
    assert 'countersign_backend_probes_total{backend="b2",result="status"}' in page
