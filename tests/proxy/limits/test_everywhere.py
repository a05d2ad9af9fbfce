"""Keys and limits in every shape of Redis, with no more rights than docs/pool.md asks for."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from tests.proxy.conftest import CHAT
from tests.support import redises, wire
from tests.support.fake_backend import FakeBackend
from tests.support.redises import Place
from tests.support.running import RunningProxy, settings_for
from tests.support.waiting import PATIENCE

Shape = Callable[[Path], AbstractContextManager[Place]]


@pytest.mark.parametrize(
    "shape", [redises.user, redises.secure, redises.behind_sentinel, redises.cluster], ids=lambda shape: shape.__name__
)
def test_keys_and_limits(shape: Shape, backend: FakeBackend, tmp_path: Path) -> None:
    backend.script = [wire.whole(wire.BODY)]
    limits = {"requests_per_minute": 2, "tokens_per_minute": 500, "concurrency": 2, "tokens": 1000}
    with (
        shape(tmp_path) as place,
        RunningProxy(settings_for(backend.url), place.url) as proxy,
        httpx.Client(base_url=proxy.url) as http,
    ):
        made = http.post("/v1/keys", json={"name": "app", "admin": True, "limits": limits})
        assert made.status_code == 201, made.text
        http.headers["authorization"] = f"Bearer {made.json()['key']}"
        statuses = [http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 9}).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        deadline = time.monotonic() + PATIENCE
        while (use := http.get("/v1/keys/app").json()["use"])["charged"] < 14:
            assert time.monotonic() < deadline, use
            time.sleep(0.02)
        assert (use["requests"], use["tokens"], use["held"], use["under_way"]) == (2, 14, 0, 0)
