"""What is kept for good outlives the key that it was sealed with."""

from __future__ import annotations

import base64
import json
import time

import msgspec
import pytest
from redis import Redis

from policies.errors import NoSealingKey
from policies.settings import Settings, parse_settings
from verifier_pool.link import endpoints, overlays, resealing
from verifier_pool.link.endpoints import Endpoint, Secret
from verifier_pool.link.overlays import BACKENDS, Desk
from verifier_pool.link.queue import ENDPOINTS
from verifier_pool.link.resealing import Resealing, reseal
from verifier_pool.link.sealing import Sealer
from verifier_pool.link.signing import Signer

OLD, NEW = bytes(32), bytes([1]) * 32
ID = endpoints.new_id()


def settings() -> Settings:
    return parse_settings("models: {m: {vocab_size: 100}}", {})


def keep(redis: Redis, sealer: Sealer) -> tuple[str, str]:
    """One of everything that is sealed for good; returns what a signer says."""
    fields = {"url": "http://b.example", "model": "m", "api_key": "sk-backend"}
    Desk(redis, settings(), "cli:x", sealer).add("b", fields)
    secrets = (endpoints.sealed(sealer, ID, "whsec_1"), endpoints.sealed(sealer, ID, "whsec_2", time.time() + 1e6))
    redis.hset(ENDPOINTS, ID, msgspec.json.encode(Endpoint(id=ID, url="https://x.example", secrets=secrets)))
    return Signer(redis, sealer=sealer).sign(b"{}", "x")


def check(redis: Redis, sealer: Sealer, signed: tuple[str, str]) -> None:
    """All of it can be had with these keys, and is what it was."""
    assert Signer(redis, sealer=sealer).sign(b"{}", "x") == signed
    found, shut = overlays.opened(overlays.read(redis.hgetall(BACKENDS))[0], sealer)  # type: ignore[arg-type]
    assert shut == {}
    assert found["b"].covered["api_key"] == "sk-backend"
    endpoint, _ = endpoints.one(redis, settings(), ID)
    assert endpoint is not None
    assert endpoints.secrets_of(endpoint, sealer, settings(), time.time()) == "whsec_1 whsec_2"


@pytest.mark.parametrize("before", [[OLD], []])
def test_a_key_can_be_taken_out(redis: Redis, before: list[bytes]) -> None:
    """Also what was stored before there was one is sealed then."""
    signed = keep(redis, Sealer(before))
    assert reseal(redis, Sealer([OLD, NEW])) == (0 if before else 3)
    assert reseal(redis, Sealer([NEW, OLD])) == 3
    check(redis, Sealer([NEW]), signed)
    assert reseal(redis, Sealer([NEW, OLD])) == 0
    assert reseal(redis, Sealer()) == 0
    check(redis, Sealer([NEW]), signed)


def test_what_cannot_be_opened_stays(redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    signed = keep(redis, Sealer([OLD]))
    redis.hset(ENDPOINTS, "we_damaged", msgspec.json.encode(Endpoint(id="we_damaged", url="u", secrets=(Secret("%"),))))
    redis.hset(ENDPOINTS, b"\xff", b"\xff")
    redis.hset(BACKENDS, b"\xff", b"{}")
    redis.hset(BACKENDS, "c", json.dumps({"sealed": {"api_key": base64.b64encode(b"\0cs\1" + bytes(60)).decode()}}))
    assert reseal(redis, Sealer([NEW])) == 0
    assert caplog.text.count("cannot be sealed anew") == 6
    assert "sk-backend" not in caplog.text
    assert reseal(redis, Sealer([NEW, OLD])) == 3
    redis.hdel(BACKENDS, "c")
    check(redis, Sealer([NEW]), signed)


def test_a_webhook_that_lost_its_old_secret_signs_with_the_new_one(redis: Redis) -> None:
    """The encryption key went too soon, and the webhook was given another secret: the old one keeps nothing back."""
    made = Endpoint(id=ID, url="https://x.example", secrets=(endpoints.sealed(Sealer([OLD]), ID, "whsec_1"),))
    with pytest.raises(NoSealingKey):
        endpoints.secrets_of(made, Sealer([NEW]), settings(), 5.0)
    after = endpoints.rotated(made, Sealer([NEW]), "whsec_2", 5.0, 100.0)
    assert endpoints.secrets_of(after, Sealer([NEW]), settings(), 6.0) == "whsec_2"
    assert endpoints.secrets_of(after, Sealer([NEW, OLD]), settings(), 6.0) == "whsec_2 whsec_1"
    # What is left of the old one keeps the new one from being sealed anew as little.
    redis.hset(ENDPOINTS, ID, msgspec.json.encode(after))
    third = bytes([2]) * 32
    assert reseal(redis, Sealer([third, NEW])) == 1
    assert reseal(redis, Sealer([third, NEW])) == 0
    again, _ = endpoints.one(redis, settings(), ID)
    assert again is not None
    assert endpoints.secrets_of(again, Sealer([third]), settings(), 6.0) == "whsec_2"
    assert again.secrets[1] == after.secrets[1]


def test_what_changes_meanwhile_stays(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(redis, Sealer([OLD]))
    again = endpoints.resealed

    def slow(id: str, stored: bytes, sealer: Sealer) -> bytes | None:
        found = again(id, stored, sealer)
        redis.hset(ENDPOINTS, id, b"another")
        return found

    monkeypatch.setitem(resealing._KEPT, ENDPOINTS, slow)
    assert reseal(redis, Sealer([NEW, OLD])) == 2
    assert redis.hget(ENDPOINTS, ID) == b"another"


def test_processes_take_turns_and_wait_for_those_that_restart(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    now, done = [1000.0], list[int]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(resealing, "reseal", lambda *_: done.append(1))
    first, second, idle = (Resealing(redis, Sealer(keys)) for keys in ([NEW], [NEW], []))
    first.look()
    assert not done
    now[0] += resealing.EVERY_SECONDS
    for each in (idle, first, second, first):
        each.look()
    assert done == [1]
    redis.delete(resealing.RESEALING)
    now[0] += resealing.EVERY_SECONDS
    second.look()
    assert done == [1, 1]
