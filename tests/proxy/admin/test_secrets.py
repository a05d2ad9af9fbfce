"""Secrets of backends: encrypted in Redis where there is a key for that, and never shown."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

import orjson
import pytest

from policies.overlay import HIDDEN
from tests.proxy.admin.conftest import House
from tests.support import wire
from tests.support.fake_backend import FakeBackend
from tests.support.waiting import wait_until
from verifier_pool.link.overlays import BACKENDS, VERSION
from verifier_pool.link.sealing import new_key

OLD, NEW = new_key(), new_key()


def stored(house: House, name: str = "new") -> bytes:
    found = house.redis.hget(BACKENDS, name)
    assert isinstance(found, bytes)
    return found


def add(house: House, url: str, name: str = "new", key: str = "sk-upstream") -> None:
    body = {"name": name, "url": url, "model": "m", "served_model": "served", "api_key": key}
    added = house.admin.post("/admin/backends", json=body)
    assert added.status_code == 201
    assert added.json()["settings"]["api_key"] == HIDDEN


def test_a_key_lies_encrypted_and_is_used(open_house: Callable[..., House], second: FakeBackend) -> None:
    house = open_house(storage={"encryption_keys": OLD})
    second.script = [wire.whole(wire.BODY)]
    add(house, second.url)
    assert b"sk-upstream" not in stored(house)
    assert "api_key" not in orjson.loads(stored(house))["fields"]
    house.admin.post("/admin/backends/b1/drain")
    assert house.chat().status_code == 200
    assert second.last.headers[b"authorization"] == b"Bearer sk-upstream"
    # What does not name it keeps it, and a key that the first of several sealed opens with any.
    assert house.admin.patch("/admin/backends/new", json={"max_concurrency": "3"}).json()["settings"] == (
        house.backend("new")["settings"] | {"max_concurrency": 3, "api_key": HIDDEN}
    )
    rotated = open_house(storage={"encryption_keys": f"{NEW} {OLD}"})
    assert rotated.chat().status_code == 200
    assert second.last.headers[b"authorization"] == b"Bearer sk-upstream"


def test_without_its_key_a_backend_is_asked_nothing(
    open_house: Callable[..., House], second: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even as the file has it, whatever was laid over that."""
    house = open_house(storage={"encryption_keys": OLD})
    add(house, second.url)
    house.admin.patch("/admin/backends/b1", json={"api_key": "sk-other", "drained": True})
    for keys in ({}, {"encryption_keys": NEW}):
        with caplog.at_level(logging.ERROR):
            other = open_house(storage=keys)
        assert other.names() == []
        left_out = other.get("/admin/backends")["left_out"]
        assert left_out.keys() == {"b1", "new"}
        assert all("api_key: sealed with the key" in why for why in left_out.values())
    # Nor is it stored in the clear by somebody who has no key for it.
    bare = open_house()
    refused = bare.admin.patch("/admin/backends/new", json={"api_key": "sk-plain"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "api_key")
    assert bare.admin.delete("/admin/backends/new").status_code == 200


def test_a_key_opens_as_no_other_backends(open_house: Callable[..., House], second: FakeBackend) -> None:
    """Whoever can write to Redis could else have it sent to an address of his own."""
    house = open_house(storage={"encryption_keys": OLD})
    add(house, second.url)
    add(house, "http://127.0.0.1:9", "mine", "sk-mine")
    mine = orjson.loads(stored(house, "mine"))
    mine["sealed"] = orjson.loads(stored(house))["sealed"]
    house.redis.hset(BACKENDS, "mine", orjson.dumps(mine))
    house.redis.set(VERSION, "other")
    wait_until(lambda: house.names() == ["b1", "new"])
    assert "belongs to something else" in house.get("/admin/backends")["left_out"]["mine"]


@pytest.mark.parametrize("storage", [{}, {"encryption_keys": OLD}], ids=["plain", "sealed"])
def test_a_key_does_not_follow_where_the_file_moves_its_backend(
    open_house: Callable[..., House], backend: FakeBackend, second: FakeBackend, storage: dict[str, str]
) -> None:
    house = open_house(storage=storage)
    backend.script = second.script = [wire.whole(wire.BODY)]
    assert house.admin.patch("/admin/backends/b1", json={"api_key": "sk-first"}).status_code == 200
    assert house.chat().status_code == 200
    assert backend.last.headers[b"authorization"] == b"Bearer sk-first"
    (entry,) = house.tree["backends"]
    house.change(backends=[entry | {"url": second.url}])
    wait_until(lambda: house.get("/admin/backends")["left_out"])
    assert house.get("/admin/backends")["left_out"] == {
        "b1": f"api_key: given for {backend.url}, and sent to no other; give it anew"
    }
    assert house.chat().status_code == 200
    assert b"authorization" not in second.last.headers
    assert house.admin.patch("/admin/backends/b1", json={"api_key": "sk-second"}).json()["holds"]
    assert house.chat().status_code == 200
    assert second.last.headers[b"authorization"] == b"Bearer sk-second"
    # Back where it was it has none, for the second one was not given for that.
    house.change(backends=[entry])
    wait_until(lambda: house.get("/admin/backends")["left_out"])
    assert house.chat().status_code == 200
    assert b"authorization" not in backend.last.headers


def test_a_key_opens_for_no_other_server(open_house: Callable[..., House], second: FakeBackend) -> None:
    """Whoever can write to Redis could else say that it was given for his."""
    house = open_house(storage={"encryption_keys": OLD})
    add(house, "http://127.0.0.1:9")
    new = orjson.loads(stored(house))
    new["fields"]["url"] = new["key_for"] = second.url
    house.redis.hset(BACKENDS, "new", orjson.dumps(new))
    house.redis.set(VERSION, "other")
    wait_until(lambda: house.names() == ["b1"])
    assert "belongs to something else" in house.get("/admin/backends")["left_out"]["new"]


def test_what_is_shown_is_no_value(house: House) -> None:
    """Whoever sends back what he was shown would else store it."""
    for fields in ({"api_key": HIDDEN}, {"url": f"http://127.0.0.1:9/{HIDDEN}"}):
        refused = house.admin.patch("/admin/backends/b1", json=fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, *fields)
    assert house.redis.hlen(BACKENDS) == 0


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/pa55-in-the-path", "http://us3r:pa55@127.0.0.1:9"])
def test_what_lets_one_in_at_an_address_is_not_shown(
    house: House, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    with caplog.at_level(logging.DEBUG):
        added = house.admin.post("/admin/backends", json={"name": "new", "url": address, "model": "m"})
        assert added.status_code == 201
        changed = house.admin.patch("/admin/backends/new", json={"url": address + "/more"})
        pages = [added.text, changed.text, json.dumps([house.get("/admin/backends"), house.audit()])]
        wait_until(lambda: "backend.change" in _logged(caplog))
        assert house.chat().status_code in (200, 502, 503)
    for page in (*pages, _logged(caplog)):
        assert "pa55" not in page
    assert "http://" in added.json()["settings"]["url"]
    assert "127.0.0.1:9" in added.json()["settings"]["url"]


def _logged(caplog: pytest.LogCaptureFixture) -> str:
    """All that a log line may be made of."""
    return "".join(str(record.__dict__) for record in list(caplog.records))
