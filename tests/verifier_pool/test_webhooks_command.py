"""`countersign webhooks` for those that are registered: made, shown, changed, sent anew, removed."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from redis import Redis

from policies.settings import hash_key
from policies.verification import unverified
from tests.verifier_pool.receiver import Receiver, listening, status
from tests.verifier_pool.test_admin_commands import Console
from verifier_pool import worker
from verifier_pool.link.endpoints import every
from verifier_pool.store import Store


@pytest.fixture
def console(tmp_path: Path, capsys: pytest.CaptureFixture[str], redis: Redis, valkey_url: str) -> Console:
    return Console(tmp_path, capsys, valkey_url)


def test_the_life_of_one(console: Console, redis: Redis) -> None:
    with listening(Receiver(status(200), status(500))) as receiver:
        rules = console.configure(
            keys=[{"name": "ann", "sha256": hash_key("sk-ann")}],
            deliveries={"networks": ["127.0.0.0/8"], "ports": [], "retries": []},
        )
        id, secret = console("webhooks", "add", receiver.url, "--key", "ann", "--verdict", "unverified").split()
        assert secret.startswith("whsec_")
        worker.run_webhooks(rules, threading.Event(), burst=True)
        store = Store(redis, verdict_ttl=600)
        for number, owner in enumerate(("sk-ann", "sk-bob")):
            store.settle(unverified(f"{number:032x}", "backlog", {"owner": hash_key(owner)}, 5.5), None)
        worker.run_webhooks(rules, threading.Event(), burst=True)
        log = console.json("webhooks", "log", id)
        assert [(each["sequence"], each["type"], each["status"]) for each in log] == [
            (2, "verification.completed", "failed"),
            (1, "webhook.test", "delivered"),
        ]
        assert "failed" in console("webhooks", "log", id, "--status", "failed")
        assert "ann" in console("webhooks", "list")
        receiver.answers = [status(200)]
        assert console("webhooks", "replay", id, "--failed") == f"{id}-2: it is sent again\n"
        assert "not over" in console("webhooks", "replay", id, f"{id}-2")
        worker.run_webhooks(rules, threading.Event(), burst=True)
    assert [body for _, body in receiver.requests][1] == [body for _, body in receiver.requests][2]
    assert console.json("webhooks", "log", id, "--limit", "1")[0]["status"] == "delivered"
    shown = console("webhooks", "change", id, "--model", "m", "--verdict", "--description", "x")
    assert "models" in shown
    assert every(redis, rules)[0].wanted == {"models": ["m"], "description": "x"}
    assert console("webhooks", "rotate", id).split()[1] != secret
    assert "two" not in console("webhooks", "show", id)
    assert console.json("webhooks", "show", id)[0]["secrets"] == 2
    assert console("webhooks", "remove", id) == "removed\n"
    assert every(redis, rules) == []


def test_what_makes_no_sense_is_said(console: Console, redis: Redis) -> None:
    console.configure()
    assert "expected https://" in console("webhooks", "add", "http://example.com/", code=1)
    assert "no key of that name" in console("webhooks", "add", "https://example.com/", "--key", "ann", code=1)
    assert "no such webhook" in console("webhooks", "show", "we_none", code=1)
    (made,) = [json.loads(console("webhooks", "add", "https://example.com/", "--json"))]
    assert "what is to be changed" in console("webhooks", "change", made["id"], code=1)
    assert "name deliveries" in console("webhooks", "replay", made["id"], code=1)
    assert "settings" in console("webhooks", "test", code=1)
