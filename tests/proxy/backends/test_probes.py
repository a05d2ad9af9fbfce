"""Background probes against backends on raw sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from policies.settings import HealthSettings
from proxy.backends.backend import Backend
from proxy.backends.pool import Backends
from proxy.backends.probes import Probes, _client, probe
from proxy.metrics import Metrics
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, PeerCloses, Received, Step
from tests.support.running import settings_for
from tests.support.waiting import PATIENCE


@pytest.fixture
def server() -> Iterator[FakeBackend]:
    with FakeBackend() as server:
        yield server


def _backends(*urls: str, **fields: Any) -> Backends:
    backends = [
        {"name": f"b{n}", "url": url, "model": "m", "served_model": "served"} | fields for n, url in enumerate(urls, 1)
    ]
    return Backends(settings_for(backends=backends))


async def _probe(backend: Backend, **rules: Any) -> str | None:
    client = _client()
    try:
        return await probe(client, backend, HealthSettings(**{"timeout": PATIENCE} | rules))
    finally:
        await client.close()


async def _found(server: FakeBackend, *script: Step, **rules: Any) -> str | None:
    server.script = script
    (backend,) = _backends(server.url).all
    return await _probe(backend, **rules)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("status", "problem"),
    [(200, None), (204, None), (404, None), (401, None), (302, None), (500, "status_500"), (503, "status_503")],
)
async def test_statuses(server: FakeBackend, status: int, problem: str | None) -> None:
    body = b"" if status == 204 else b"{}"
    assert await _found(server, wire.whole(body, status)) == problem


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ([Close()], "unreachable"),
        ([Close(reset=True)], "unreachable"),
        ([b"SMTP ready\r\n\r\n", Close()], "unreachable"),
        ([PeerCloses()], "timeout"),
        ([b"HTTP/1.1 200 OK\r\n", PeerCloses()], "timeout"),
        ([b"HTTP/1.1 200 OK\r\nx: " + b"y" * 10_000_000], "unreachable"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n", 5.0], None),
    ],
)
async def test_whatever_comes(server: FakeBackend, script: list[Step], problem: str | None) -> None:
    assert await _found(server, *script, timeout=1.0 if problem == "timeout" else PATIENCE) == problem


async def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (backend,) = _backends(f"http://127.0.0.1:{free.getsockname()[1]}").all
        assert await _probe(backend) == "unreachable"


def _pages(models: bytes) -> Any:
    def script(request: Received) -> list[Step]:
        return [wire.whole(models if b"/v1/models" in request.line else b"")]

    return script


def _listing(*names: str) -> bytes:
    return json.dumps({"object": "list", "data": [{"id": name, "object": "model"} for name in names]}).encode()


@pytest.mark.parametrize(
    ("models", "problem"),
    [
        (_listing("other", "served"), None),
        (_listing("other"), "model_missing"),
        (_listing(), "model_missing"),
        (_listing("m"), "model_missing"),
        (b"no JSON", None),
        (b'{"data": 3}', None),
        (b'{"data": [' + b"[" * 5000, None),
        (_listing("other") + b" " * (2 * 1024 * 1024), None),
    ],
)
async def test_the_model_is_listed(server: FakeBackend, models: bytes, problem: str | None) -> None:
    server.script = _pages(models)
    (backend,) = _backends(server.url).all
    assert await _probe(backend, models=True) == problem
    assert await _probe(backend, models=False) is None


async def test_no_list_of_models_is_no_fault(server: FakeBackend) -> None:
    assert await _found(server, wire.whole(_listing("other"), 404), models=True) is None


async def test_what_it_says_of_us(server: FakeBackend) -> None:
    """Its own key and nothing else: no cookie that it set, no mark of ours."""
    server.script = [b"HTTP/1.1 200 OK\r\nset-cookie: a=b; Path=/\r\ncontent-length: 0\r\n\r\n"]
    (backend,) = _backends(server.url + "/v1/", api_key="sk-theirs").all
    client = _client()
    for _ in range(2):
        await probe(client, backend, HealthSettings(path="/ping?x=1"))
    await client.close()
    last = server.last
    assert last.line == b"GET /ping?x=1 HTTP/1.1"
    assert last.headers[b"authorization"] == b"Bearer sk-theirs"
    assert b"cookie" not in last.headers
    assert not any(b"countersign-" in name for name in last.headers)


async def test_one_that_hangs_holds_up_no_other(server: FakeBackend) -> None:
    server.script = [wire.whole(b"", 500)]
    with FakeBackend([60.0]) as hung:
        backends = _backends(server.url, hung.url)
        probes = Probes(HealthSettings(interval=0.05, timeout=PATIENCE, down_after=2), backends, Metrics())
        probes.start()
        try:
            async with asyncio.timeout(PATIENCE):
                await _until(lambda: not backends.all[0].up)
            server.script = [wire.whole(b"")]
            async with asyncio.timeout(PATIENCE):
                await _until(lambda: backends.all[0].up)
        finally:
            await probes.close()
        assert backends.all[1].up
        count = len(server.requests)
        await asyncio.sleep(0.2)
        assert len(server.requests) == count


async def test_probes_come_at_their_interval_and_not_together(server: FakeBackend) -> None:
    server.script = [wire.whole(b"")]
    backends = _backends(*[server.url] * 8)
    probes = Probes(HealthSettings(interval=0.2), backends, Metrics())
    probes.start()
    began = time.monotonic()
    async with asyncio.timeout(PATIENCE):
        await _until(lambda: len(server.requests) >= 8 * 5)
    rounds = (time.monotonic() - began) / 0.2
    assert rounds > 3
    await probes.close()
    assert len(server.requests) <= 8 * (rounds + 2)
    first = sorted(request.at for request in server.requests)[:8]
    assert max(later - sooner for sooner, later in itertools.pairwise(first)) > 0.005


async def test_switched_off(server: FakeBackend) -> None:
    probes = Probes(HealthSettings(interval=0), _backends(server.url), Metrics())
    probes.start()
    await asyncio.sleep(0.1)
    await probes.close()
    assert server.requests == []
