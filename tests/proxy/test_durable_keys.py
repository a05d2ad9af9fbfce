"""Keys made and revoked over HTTP are as durable as the settings ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.proxy.conftest import Rig
from tests.support.running import RunningProxy
from tests.support.waiting import wait_until


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Iterator[Rig]:
    made = make_rig(durability={"aof": True})
    made.redis.flushall()
    yield made
    made.redis.config_set("appendonly", "no")
    made.redis.flushall()


def test_they_wait_for_the_disk(rig: Rig) -> None:
    assert isinstance(rig.proxy, RunningProxy)
    lost = rig.http.post("/v1/keys", json={"name": "boss", "admin": True})
    assert lost.status_code == 503
    rig.redis.flushall()
    rig.redis.config_set("appendonly", "yes")
    wait_until(lambda: not rig.redis.info("persistence")["aof_rewrite_in_progress"])
    made = wait_until(lambda: _made(rig))
    headers = {"authorization": f"Bearer {made}"}
    assert rig.http.get("/v1/keys/boss", headers=headers).status_code == 200
    assert rig.http.delete("/v1/keys/boss", headers=headers).json()["state"] == "revoked"
    assert rig.http.get("/v1/keys/boss", headers=headers).status_code == 401


def _made(rig: Rig) -> str:
    """The text of a new admin key; nothing while the outage that this began still lasts."""
    answer = rig.http.post("/v1/keys", json={"name": "boss", "admin": True})
    return str(answer.json()["key"]) if answer.status_code < 300 else ""
