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
    # It was done, and may be lost: its text is said, since nobody could ask for it again.
    assert (lost.status_code, lost.json()["durable"], lost.json()["state"]) == (202, False, "active")
    headers = {"authorization": f"Bearer {lost.json()['key']}"}
    assert rig.http.post("/v1/keys", json={"name": "boss"}, headers=headers).status_code == 409
    assert rig.http.post("/v1/keys", json={"name": "app"}, headers=headers).status_code == 202
    limited = rig.http.patch("/v1/keys/app", json={"limits": {}}, headers=headers)
    assert (limited.status_code, limited.json()["durable"]) == (202, False)
    revoked = rig.http.delete("/v1/keys/app", headers=headers)
    assert (revoked.status_code, revoked.json()["state"], revoked.json()["durable"]) == (202, "revoked", False)
    rig.redis.config_set("appendonly", "yes")
    wait_until(lambda: not rig.redis.info("persistence")["aof_rewrite_in_progress"])
    made = rig.http.post("/v1/keys", json={"name": "other"}, headers=headers)
    assert (made.status_code, "durable" in made.json()) == (201, False)
    gone = rig.http.delete("/v1/keys/boss", headers=headers)
    assert (gone.status_code, gone.json()["state"], "durable" in gone.json()) == (200, "revoked", False)
    assert rig.http.get("/v1/keys/boss", headers=headers).status_code == 401
