"""Routing honours standing: who gets requests in which state, also while Redis is away."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import httpx
import pytest

from policies.settings import hash_key
from proxy.asking import PATIENCE
from tests.proxy.conftest import CHAT, Rig
from tests.support import wire
from tests.support.fake_backend import FakeBackend, Until
from tests.support.running import RunningProxy
from tests.support.valkey import Valkey
from verifier_pool.link.queue import STANDINGS

KEYS = [
    {"name": "ann", "sha256": hash_key("sk-ann")},
    {"name": "root", "sha256": hash_key("sk-root"), "admin": True},
]
ANN, ROOT = ({"authorization": f"Bearer sk-{name}"} for name in ("ann", "root"))
TO_B1 = {"x-countersign-backend": "b1"}


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    """One of the test's own, which it may stop."""
    with Valkey() as server:
        yield server


@pytest.fixture
def pair(make_rig: Callable[..., Rig], second: FakeBackend) -> Callable[..., Rig]:
    """Makes a rig with two backends that answer."""

    def make(**sections: Any) -> Rig:
        rig = make_rig(second.url, **sections)
        rig.backend.script = second.script = lambda request: (
            wire.stream() if json.loads(request.body).get("stream") else [wire.whole(wire.BODY)]
        )
        return rig

    return make


def _took(rig: Rig, second: FakeBackend, requests: int, **options: Any) -> tuple[int, int]:
    """How many of so many requests each backend got."""
    before = len(rig.backend.requests), len(second.requests)
    for n in range(requests):
        assert rig.chat(stream=n % 2 == 1, **options).status_code == 200
    return len(rig.backend.requests) - before[0], len(second.requests) - before[1]


def _refused(response: httpx.Response) -> None:
    assert response.status_code == 503
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.json()["error"]["code"] == "backend_unavailable"
    assert "quarantine" not in response.text
    assert "retry-after" in response.headers


@pytest.mark.parametrize("states", [("trial", "trial"), ("trial", "trusted"), ("trusted", "trusted")])
def test_trial_and_trusted_share_alike(pair: Callable[..., Rig], second: FakeBackend, states: tuple[str, str]) -> None:
    rig = pair()
    for name, state in zip(("b1", "b2"), states, strict=True):
        rig.stand(name, state)
    assert _took(rig, second, 20) == (10, 10)


def test_a_quarantined_backend_gets_nothing(pair: Callable[..., Rig], second: FakeBackend) -> None:
    rig = pair(keys=KEYS)
    rig.stand("b1", "quarantined")
    assert _took(rig, second, 20, headers=ANN) == (0, 20)
    rig.stand("b1", "trial")
    assert _took(rig, second, 20, headers=ANN) == (10, 10)


def test_an_admins_hint_reaches_it(pair: Callable[..., Rig], second: FakeBackend) -> None:
    rig = pair(keys=KEYS)
    rig.stand("b1", "quarantined")
    assert _took(rig, second, 4, headers=ROOT | TO_B1) == (4, 0)
    assert rig.chat(headers=ANN | TO_B1).status_code == 400
    assert _took(rig, second, 4, headers=ROOT) == (0, 4)


def test_it_does_not_stand_in_for_one_that_is_gone(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("http://127.0.0.1:9", keys=KEYS)
    rig.stand("b1", "quarantined")
    _refused(rig.chat(headers=ANN))
    _refused(rig.chat(headers=ANN))
    assert rig.backend.requests == []


def test_all_quarantined(pair: Callable[..., Rig], second: FakeBackend) -> None:
    rig = pair(keys=KEYS)
    assert [model["id"] for model in rig.http.get("/v1/models", headers=ANN).json()["data"]] == ["m"]
    rig.stand("b1", "quarantined")
    assert rig.http.get("/v1/models", headers=ANN).json()["data"] != []
    assert rig.http.get("/readyz").json()["status"] == "ready"
    rig.stand("b2", "quarantined")
    for stream in (False, True):
        _refused(rig.chat(headers=ANN, stream=stream))
        _refused(rig.chat(headers=ROOT, stream=stream))
    assert rig.backend.requests == second.requests == []
    assert rig.http.get("/v1/models", headers=ANN).json()["data"] == []
    assert rig.http.get("/v1/models/m", headers=ANN).status_code == 503
    assert rig.http.get("/v1/models/none", headers=ANN).status_code == 404
    assert rig.chat(headers=ANN, model="none").status_code == 404
    # Ready all the same: the way to the operator's pardon must not be shut.
    ready = rig.http.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "no backend available")
    assert rig.chat(headers=ROOT | TO_B1).status_code == 200
    rig.stand("b2", None)
    assert rig.chat(headers=ANN).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_runs_is_finished(pair: Callable[..., Rig], stream: bool) -> None:
    rig = pair()
    rig.stand("b2", "quarantined")
    go = threading.Event()
    frames = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES), wire.LAST_CHUNK]
    whole = [wire.whole(wire.BODY)[:-20], wire.whole(wire.BODY)[-20:]]
    first, *rest = frames if stream else whole
    rig.backend.script = [first, Until(go), *rest]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(rig.chat, stream=stream)
        while not rig.backend.requests:
            time.sleep(0.01)
        rig.stand("b1", "quarantined")
        _refused(httpx.post(f"{rig.proxy.url}/v1/chat/completions", json=CHAT))
        go.set()
        response = running.result()
    assert response.status_code == 200
    assert response.content.endswith(wire.DONE) if stream else b"One two three" in response.content
    assert rig.evidence(response.headers["x-countersign-id"]).complete


def test_known_before_the_first_request(pair: Callable[..., Rig], second: FakeBackend, valkey: Valkey) -> None:
    rig = pair()
    rig.stand("b1", "quarantined")
    with RunningProxy(rig.proxy.services.settings, valkey.url) as restarted:
        for _ in range(4):
            assert httpx.post(f"{restarted.url}/v1/chat/completions", json=CHAT).status_code == 200
    assert (len(rig.backend.requests), len(second.requests)) == (0, 4)


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_redis_away_leaves_the_last_known(
    pair: Callable[..., Rig], second: FakeBackend, valkey: Valkey, how: str
) -> None:
    rig = pair(keys=KEYS)
    rig.stand("b1", "quarantined")
    getattr(valkey, how)()
    rig.chat(headers=ANN)
    time.sleep(PATIENCE + 1.2)
    assert _took(rig, second, 20, headers=ANN) == (0, 20)
    (b1, _) = rig.http.get("/v1/backends", headers=ROOT).json()["data"]
    assert b1["state"] == "quarantined"
    valkey.thaw() if how == "freeze" else valkey.start()
    rig.stand("b2", "quarantined")
    rig.stand("b1", "trusted")
    assert _took(rig, second, 4, headers=ANN) == (4, 0)


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"state": "trial"}',
        b'{"state": "free", "audit_rate": 1, "since": 1}',
        b'{"state": "trial", "audit_rate": 7, "since": 1}',
        b'{"state": "trial", "audit_rate": "1", "since": 1}',
        b'{"state": "trial", "audit_rate": 1, "since": null}',
        b"[" * 100_000,
    ],
)
def test_an_entry_that_says_nothing_changes_nothing(
    pair: Callable[..., Rig], second: FakeBackend, entry: bytes
) -> None:
    rig = pair()
    rig.stand("b1", "quarantined")
    (field,) = cast("list[bytes]", rig.redis.hkeys(STANDINGS))
    rig.redis.hset(STANDINGS, field, entry)
    rig.stand("b2", "trusted")
    time.sleep(0.4)
    assert _took(rig, second, 4) == (0, 4)


def test_another_declaration_is_another_record(
    backend: FakeBackend, second: FakeBackend, pair: Callable[..., Rig], make_rig: Callable[..., Rig]
) -> None:
    rig = pair()
    rig.stand("b1", "quarantined")
    redeclared = [
        {"name": "b1", "url": backend.url, "model": "m", "runtime": "vllm-0.32-v1"},
        {"name": "b2", "url": second.url, "model": "m", "runtime": "vllm-0.32-v2"},
    ]
    other = make_rig(backends=redeclared)
    assert _took(other, second, 4) == (2, 2)
    assert _took(rig, second, 4) == (0, 4)


def test_a_suspect_serves_when_the_others_cannot(pair: Callable[..., Rig], second: FakeBackend) -> None:
    rig = pair(standing={"suspect_share": 0})
    rig.stand("b1", "suspect")
    assert _took(rig, second, 10) == (0, 10)
    rig.stand("b2", "quarantined")
    assert _took(rig, second, 4) == (4, 0)
    rig.stand("b2", "trusted")
    rig.proxy.services.backends.all[1].rest(5)
    assert _took(rig, second, 2) == (2, 0)


def test_metrics_of_standing_are_for_admins(pair: Callable[..., Rig]) -> None:
    rig = pair(keys=KEYS)
    rig.stand("b1", "suspect", audit_rate=0.75)
    assert rig.chat(headers=ANN).status_code == 200
    rows = rig.http.get("/metrics", headers=ROOT).text.splitlines()
    assert 'countersign_backend_state{backend="b1",model="m",state="suspect"} 1.0' in rows
    assert 'countersign_backend_state{backend="b1",model="m",state="trusted"} 0.0' in rows
    assert 'countersign_backend_state{backend="b2",model="m",state="trial"} 1.0' in rows
    assert 'countersign_backend_audit_rate{backend="b1",model="m"} 0.75' in rows
    assert 'countersign_backend_audit_rate{backend="b2",model="m"} 1.0' in rows
    for headers in ({}, ANN, {"authorization": "Bearer sk-wrong"}):
        page = rig.http.get("/metrics", headers=headers)
        assert page.status_code == 200
        assert "countersign_in_flight" in page.text
        assert "suspect" not in page.text
        assert "audit_rate" not in page.text


def test_a_key_of_another_kind_is_no_outage(pair: Callable[..., Rig], second: FakeBackend) -> None:
    rig = pair()
    rig.stand("b1", "quarantined")
    rig.redis.delete(STANDINGS)
    rig.redis.set(STANDINGS, b"")
    time.sleep(0.5)
    assert rig.http.get("/readyz").json()["redis"] == "up"
    assert _took(rig, second, 4) == (0, 4)
    assert not rig.proxy.services.outage.down


def test_a_fixed_audit_rate_is_shown(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(audit={"rate": 0.2})
    assert 'countersign_backend_audit_rate{backend="b1",model="m"} 0.2' in rig.http.get("/metrics").text.splitlines()
