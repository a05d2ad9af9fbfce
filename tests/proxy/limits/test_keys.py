"""Keys in Redis: who is let in, from when, until when, and what becomes of their text."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import cast

import httpx
import pytest

from policies.settings import hash_key
from tests.proxy.conftest import CHAT, Rig
from tests.proxy.limits.conftest import Door, serving
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, Step
from tests.support.running import RunningProxy, settings_for
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE, wait_until
from verifier_pool.link.keys import KEYS, KeyStore
from verifier_pool.link.telemetry import log

REFUSED = {
    "message": "no valid API key came with the request",
    "type": "authentication_error",
    "param": None,
    "code": "invalid_api_key",
}
ANSWER = [wire.whole(wire.BODY)]
ROOT = {"authorization": "Bearer sk-root"}


def _until(status: int, ask: Callable[[], httpx.Response]) -> None:
    wait_until(lambda: ask().status_code == status)


def _revoke(door: Door, key: str) -> None:
    record, before = door.store.get(door.made[key].name)
    assert record is not None
    assert door.store.change(record.name, before, record.model_copy(update={"revoked": time.time()}))


def test_a_new_key_works_at_once_and_a_revoked_one_no_longer_soon(make_door: Callable[..., Door]) -> None:
    door = make_door(2)
    door.backend.script = ANSWER
    key = door.key()
    assert [door.ask(key, at=at).status_code for at in (0, 1)] == [200, 200]
    _revoke(door, key)
    for at in (0, 1):
        _until(401, lambda at=at: door.ask(key, at=at))  # type: ignore[misc]


def test_refusals_are_all_alike(door: Door) -> None:
    door.backend.script = ANSWER
    end = time.time() + 0.5
    revoked, expired = door.key("revoked"), door.key("expired", expires=end)
    assert door.ask(expired).status_code == 200 or time.time() >= end
    _revoke(door, revoked)
    _until(401, lambda: door.ask(expired))
    assert time.time() >= end
    _until(401, lambda: door.ask(revoked))
    for key in (revoked, expired, "sk-none", "sk-" + "x" * 3000, "sk-root2", hash_key("sk-root"), "é"):
        response = door.clients[0].post(
            "/v1/chat/completions", json=CHAT, headers={b"authorization": b"Bearer " + key.encode()}
        )
        assert response.status_code == 401
        assert response.json() == {"error": REFUSED}
    for headers in ({}, {"authorization": "Basic x"}, {"authorization": "Bearer"}, {"x-api-key": "sk-none"}):
        assert door.clients[0].post("/v1/chat/completions", json=CHAT, headers=headers).json() == {"error": REFUSED}


def test_nobody_who_is_known_costs_a_round_trip(
    make_door: Callable[..., Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    # No look is made but those that somebody's key is the reason for.
    monkeypatch.setattr("proxy.limits.registry.EVERY", 3600.0)
    door = make_door()
    key = door.key()
    door.backend.script = ANSWER
    assert door.ask(key).status_code == 200
    asked = 0
    look = door.proxies[0].services.registry.look

    async def counted() -> None:
        nonlocal asked
        asked += 1
        await look()

    monkeypatch.setattr(door.proxies[0].services.registry, "look", counted)
    for _ in range(5):
        assert door.ask(key).status_code == 200
    assert asked == 0
    assert door.ask("sk-none").status_code == 401
    assert asked == 1


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_without_redis_who_is_known_goes_on_and_nobody_else(door: Door, valkey: Valkey, how: str) -> None:
    key, revoked = door.key(), door.key("revoked")
    door.backend.script = ANSWER
    _revoke(door, revoked)
    assert door.ask(key).status_code == 200
    getattr(valkey, how)()
    try:
        assert door.ask(key).status_code == 200
        assert door.ask("sk-root").status_code == 200
        answers = [door.ask(each) for each in (revoked, "sk-none", "sk-more")]
        listed = door.clients[0].get("/v1/models", headers={"authorization": "Bearer sk-none"})
        nobody = door.clients[0].post("/v1/chat/completions", json=CHAT)
    finally:
        valkey.thaw() if how == "freeze" else valkey.start()
    for answer in (*answers, listed):
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "keys_unavailable"
    assert len({answer.text for answer in (*answers, listed)}) == 1
    assert nobody.status_code == 401
    assert door.ask(key).status_code == 200
    _until(401, lambda: door.ask("sk-none"))


def test_who_asks_first_after_redis_went_away_is_not_let_in(backend: FakeBackend, valkey: Valkey) -> None:
    """Without keys in the settings nobody knows whether Redis has any: then not even this machine is served."""
    valkey.kill()
    backend.script = ANSWER
    with ExitStack() as stack:
        proxy = stack.enter_context(RunningProxy(settings_for(backend.url), valkey.url))
        http = stack.enter_context(httpx.Client(base_url=proxy.url))
        for headers in ({}, {"authorization": "Bearer x"}):
            answer = http.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "keys_unavailable")
        assert http.get("/healthz").status_code == 200
        valkey.start()
        _until(200, lambda: http.post("/v1/chat/completions", json=CHAT))


def test_the_first_key_ends_this_machines_privilege(make_door: Callable[..., Door]) -> None:
    door = make_door(keys=[])
    door.backend.script = ANSWER
    http = door.clients[0]
    assert door.ask("anything").status_code == 200
    made = http.post("/v1/keys", json={"name": "first", "admin": True})
    assert made.status_code == 201
    assert door.ask("anything").status_code == 401
    assert http.get("/v1/models").status_code == 401
    admin = {"authorization": f"Bearer {made.json()['key']}"}
    assert http.get("/v1/models", headers=admin).status_code == 200
    assert http.delete("/v1/keys/first", headers=admin).json()["state"] == "revoked"
    for _ in range(2):
        assert http.get("/v1/models", headers=admin).status_code == 401
        assert door.ask("anything").status_code == 401
        door.redis.flushall()  # what Redis forgets opens nothing
        time.sleep(1.2)


def test_other_machines_are_served_once_there_is_a_key(door: Door, valkey: Valkey, tmp_path: Path) -> None:
    settings = {"host": "0.0.0.0", "redis_url": valkey.url}
    with serving(tmp_path, settings) as (url, process):
        assert (url, process.wait(PATIENCE)) == ("", 3)
    key = door.key()
    with serving(tmp_path, settings) as (url, _):
        here = url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{here}/v1/models").status_code == 401
        assert httpx.get(f"{here}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
    with serving(tmp_path, settings | {"redis_url": "redis://127.0.0.1:1"}) as (url, process):
        assert (url, process.wait(PATIENCE)) == ("", 3)


def test_keys_over_http(door: Door) -> None:
    http = door.clients[0]
    limits = {"requests_per_minute": 5, "tokens": 1000, "every": "day"}
    made = http.post("/v1/keys", json={"name": "ann", "limits": limits, "expires": time.time() + 60}, headers=ROOT)
    assert made.status_code == 201
    text = made.json()["key"]
    prefix, _, secret = text.partition("_")
    assert prefix == made.json()["prefix"]
    assert prefix.startswith("sk-")
    assert len(secret) == 43
    door.backend.script = ANSWER
    assert door.ask(text, max_tokens=10).status_code == 200
    listed = http.get("/v1/keys", headers=ROOT)
    assert [(each["name"], each["from"], each["state"]) for each in listed.json()["data"]] == [
        ("root", "settings", "active"),
        ("ann", "redis", "active"),
    ]
    assert text not in listed.text
    assert hash_key(text) not in listed.text
    # What it took is settled behind its back.
    wait_until(lambda: http.get("/v1/keys/ann", headers=ROOT).json()["use"]["charged"] == 7)
    shown = http.get("/v1/keys/ann", headers=ROOT).json()
    assert (shown["use"]["requests"], shown["use"]["charged"]) == (1, 7)
    assert shown["applies"] == limits
    again = http.post("/v1/keys", json={"name": "ann"}, headers=ROOT)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")
    assert http.post("/v1/keys", json={"name": "root"}, headers=ROOT).status_code == 409
    assert http.delete("/v1/keys/ann", headers=ROOT).json()["state"] == "revoked"
    assert door.ask(text).status_code == 401
    assert http.delete("/v1/keys/ann", headers=ROOT).status_code == 200
    assert http.delete("/v1/keys/root", headers=ROOT).status_code == 409
    assert http.get("/v1/keys/none", headers=ROOT).status_code == 404


def test_keys_are_for_admins(door: Door) -> None:
    key = {"authorization": f"Bearer {door.key('plain', operator=True)}"}
    http = door.clients[0]
    for headers, status in ((key, 403), ({"authorization": "Bearer sk-none"}, 401), ({}, 401)):
        assert http.get("/v1/keys", headers=headers).status_code == status
        assert http.get("/v1/keys/plain", headers=headers).status_code == status
        assert http.delete("/v1/keys/plain", headers=headers).status_code == status
        assert http.post("/v1/keys", json={"name": "x"}, headers=headers).status_code == status
    assert len(door.store.all()[0]) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b'{"name": 1}', None),
        (b'{"name": "x", "more": 1}', None),
        (b'{"name": ""}', "name"),
        (b'{"name": "a b"}', "name"),
        (b'{"name": "' + b"x" * 101 + b'"}', "name"),
        (b'{"name": "x", "expires": 1}', "expires"),
        (b'{"name": "x", "expires": 1e300}', "expires"),
        (b'{"name": "x", "limits": {"tokens": 0}}', "limits"),
        (b'{"name": "x", "limits": {"tokens": 1e16}}', "limits"),
        (b'{"name": "x", "limits": {"token": 5}}', "limits"),
        (b'{"name": "x", "limits": {"every": "year"}}', "limits"),
    ],
)
def test_what_is_no_key(door: Door, body: bytes, param: str | None) -> None:
    headers = ROOT | {"content-type": "application/json"}
    response = door.clients[0].post("/v1/keys", content=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert door.clients[0].post("/v1/keys", content=b'{"name": "x"}', headers=ROOT).status_code == 400
    assert door.store.all() == ([], 0)


def test_keys_that_cannot_be_read_let_nobody_in(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    key = door.key("good")
    bad = door.key("bad")
    stored = json.loads(cast(bytes, door.redis.hget(KEYS, "bad")))
    door.redis.hset(KEYS, "bad", json.dumps(stored | {"limits": {"tokens": -1}}))
    door.key("later")
    door.backend.script = ANSWER
    assert door.ask(key).status_code == 200
    assert door.ask(bad).status_code == 401
    assert any("cannot be read" in record.message for record in caplog.records)


def test_changes_do_not_overwrite_each_other(door: Door) -> None:
    door.key("x")
    record, before = door.store.get("x")
    assert record is not None
    assert door.store.change("x", before, record.model_copy(update={"admin": True}))
    assert not door.store.change("x", before, record.model_copy(update={"operator": True}))
    assert not door.store.change("x", "", record)


def test_only_the_hash_is_kept(door: Door) -> None:
    key = door.key("app", requests_per_minute=5, tokens=5000, tokens_per_minute=5000, concurrency=5)
    door.backend.script = ANSWER
    assert door.ask(key, max_tokens=5).status_code == 200
    time.sleep(0.3)
    secret = key.partition("_")[2].encode()
    for name in cast("list[bytes]", door.redis.keys()):
        assert secret not in name
        assert secret not in cast(bytes, door.redis.dump(name))


CANARY = "sk-clientcanary"
REPLIES: list[list[Step]] = [[wire.whole(b"{}")], [wire.whole(b'{"error": {"message": "no"}}', 401)], [Close()]]
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize")


@pytest.mark.parametrize("path", PATHS)
def test_keys_stay_on_their_side(make_rig: Callable[..., Rig], path: str) -> None:
    """A client's key never reaches a backend; a backend's never a client, not even by an error that repeats it; and
    neither is ever in a log."""
    keys = [{"name": "k", "sha256": hash_key(CANARY), "limits": {"requests_per_minute": 100, "tokens": 10**6}}]
    lines = io.StringIO()
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    log.configure("DEBUG", lines)
    try:
        rig = make_rig(keys=keys)
        backend = {**rig.proxy.services.settings.backends[0].model_dump(exclude_none=True), "api_key": "backendcanary"}
        rig = make_rig(keys=keys, backends=[backend])
        for script in REPLIES:
            rig.backend.script = script
            for headers in ({"authorization": f"Bearer {CANARY}"}, {"x-api-key": CANARY}):
                extra = {"proxy-authorization": CANARY, "cookie": CANARY, "api-key": CANARY, "x-goog-api-key": CANARY}
                with suppress(httpx.HTTPError):
                    response = rig.http.post(path, json=CHAT | {"prompt": "x"}, headers=headers | extra)
                    assert "canary" not in response.text + str(response.headers)
        assert len(rig.backend.requests) >= 4
        for request in rig.backend.requests:
            assert CANARY.encode() not in request.raw_headers + request.body + request.line
            assert request.headers[b"authorization"] == b"Bearer backendcanary"
        rig.http.post(path, json=CHAT, headers={"authorization": "Bearer sk-othercanary"})
        time.sleep(0.3)  # lines are written together
    finally:
        logging.getLogger("proxy").setLevel(logging.NOTSET)
        root.handlers[:], root.level = before, level
    assert lines.getvalue()
    assert "canary" not in lines.getvalue()
    assert hash_key(CANARY) not in lines.getvalue()


def test_a_key_store_names_what_it_cannot_read(door: Door) -> None:
    door.redis.hset(KEYS, "junk", b"\xff")
    assert KeyStore(door.redis).all() == ([], 1)
    assert KeyStore(door.redis).get("junk")[0] is None
