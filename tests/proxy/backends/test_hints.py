"""An admin's choice of a backend, and what admins are shown of backends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from tests.proxy.backends.live import ANN, BUSY, ERROR, KEYS, QUICK, ROOT, Trio, breaker_of, reset, took
from tests.proxy.conftest import CHAT, Rig
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, Until
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("empty")


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
def test_hints(trio: Trio, path: str) -> None:
    rig, servers = trio(keys=KEYS)
    ann, root = "authorization: Bearer sk-ann", "authorization: Bearer sk-root"
    for name in ("x-countersign-backend", "X-Countersign-Backend", "X-COUNTERSIGN-BACKEND"):
        assert _hinted(rig, path, root, f"{name}: b3").status_code == 200
        for wish in ("b3", "b9", ""):
            assert _hinted(rig, path, ann, f"{name}: {wish}").status_code == 400
    assert took(servers) == [0, 0, 3]
    for wrong in ("b9", "", "b3,b1", "B3", "b1 b3"):
        assert _hinted(rig, path, root, f"x-countersign-backend: {wrong}").status_code == 400
    twice = ["x-countersign-backend: b1", "X-Countersign-Backend: b3"]
    for lines in (twice, twice[::-1], twice[:1] * 2):
        assert _hinted(rig, path, root, *lines).status_code == 400
        assert _hinted(rig, path, ann, *lines).status_code == 400
    assert took(servers) == [0, 0, 3]
    for server in servers:
        for request in server.requests:
            assert b"countersign-backend" not in request.raw_headers.lower()
            assert b"b3" not in request.raw_headers


def test_a_hint_is_followed_to_one_that_is_out(trio: Trio) -> None:
    rig, servers = trio(keys=KEYS, breaker=QUICK | {"open_seconds": 60, "longest": 60})
    to_first = ROOT | {"x-countersign-backend": "b1"}
    servers[0].script = [Close()]
    for _ in range(6):
        assert rig.chat(headers=to_first).status_code == 502
    assert breaker_of(rig) == "open"
    assert len(servers[0].requests) == 6
    assert rig.chat(headers=ANN).status_code == 200
    assert len(servers[0].requests) == 6
    rig.stand("b1", "quarantined")
    servers[0].script = [wire.whole(wire.BODY)]
    assert rig.chat(headers=to_first).status_code == 200
    assert breaker_of(rig) == "closed"
    reset(servers)
    assert [rig.chat(headers=ANN).status_code for _ in range(4)] == [200] * 4
    assert took(servers)[0] == 0


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
        wait_until(lambda: backend.requests)
        assert rig.chat(headers=to_first).status_code == 503
        assert rig.chat().status_code == 200
        over.set()
        assert first.result().status_code == 200
    assert (len(backend.requests), len(second.requests)) == (1, 1)


def test_what_is_shown(trio: Trio) -> None:
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
