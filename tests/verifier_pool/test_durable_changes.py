"""What an admin changes counts once it is as durable as the settings ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from policies.settings import DurabilitySettings, Settings
from tests.support.valkey import Valkey
from tests.support.waiting import wait_until
from verifier_pool import declarations
from verifier_pool.link import overlays, trail
from verifier_pool.link.durable import NotDurable
from verifier_pool.link.keys import KeyStore, issue, write
from verifier_pool.link.queue import declaration_key
from verifier_pool.link.sealing import Sealer
from verifier_pool.standing import Standings

DURABLE = DurabilitySettings(aof=True)
SETTINGS = Settings.model_validate(
    {
        "models": {"m": {}},
        "backends": [{"name": "b", "url": "http://127.0.0.1:9", "model": "m"}],
        "durability": {"aof": True},
    }
)


@pytest.fixture
def client() -> Iterator[redis.Redis]:
    """A Valkey of its own, with an append-only file once a test says so."""
    with Valkey() as server, server.client() as client:
        yield client


def _aof(client: redis.Redis, *, on: bool) -> None:
    client.config_set("appendonly", "yes" if on else "no")
    wait_until(lambda: not on or not client.info("persistence")["aof_rewrite_in_progress"])


def test_a_key(client: redis.Redis) -> None:
    _aof(client, on=True)
    _, key = issue("app", 1.0)
    store = KeyStore(client, DURABLE)
    assert store.change("app", "", key)
    assert not store.change("app", "something else", key)
    _aof(client, on=False)
    revoked = key.model_copy(update={"revoked": 2.0})
    with pytest.raises(NotDurable, match="it was done"):
        store.change("app", write(key), revoked)
    assert store.get("app")[0] == revoked
    assert KeyStore(client).change("app", write(revoked), None)


def test_a_backend(client: redis.Redis) -> None:
    desk = overlays.Desk(client, SETTINGS, "cli:test", Sealer())
    with pytest.raises(NotDurable, match="it was done"):
        desk.drain("b")
    _aof(client, on=True)
    assert not desk.drain("b", drained=False).drained


def test_a_decision_about_a_standing(client: redis.Redis) -> None:
    standings = Standings(client, SETTINGS)
    with pytest.raises(NotDurable, match="it was done"):
        standings.override("b", "quarantine", by="me", why="a test", actor="cli:test")
    (record,) = standings.records("b").values()
    assert record.state == "quarantined"
    assert [each["action"] for each in trail.read(client)] == ["standing.quarantine"]
    _aof(client, on=True)
    assert standings.override("b", "release", by="me", why="a test", actor="cli:test").state == "trial"


def test_a_declaration_that_is_taken_at_its_word_again(client: redis.Redis) -> None:
    _aof(client, on=True)
    for on in (True, False):
        _aof(client, on=on)
        client.hset(declaration_key("b"), "old", b'{"fits": "new", "id": "x", "at": 1.0}')
        if on:
            assert declarations.accept(client, "b", DURABLE, "test", 9) == ["old"]
            continue
        with pytest.raises(NotDurable, match="it was done"):
            declarations.accept(client, "b", DURABLE, "test", 9)
    assert declarations.entries(client, "b") == {}
    assert [each["after"] for each in trail.read(client)] == [{"runtimes": ["old"]}] * 2
