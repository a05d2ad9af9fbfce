"""Who is told of an event, and what it costs to find that out."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from redis import Redis

from policies.settings import Settings, hash_key
from policies.subscription import Subscription
from policies.verification import unverified
from tests.verifier_pool.toy import settings
from verifier_pool.link import events
from verifier_pool.link.directory import Directory
from verifier_pool.link.endpoints import SETTINGS, VERSION, Endpoint
from verifier_pool.link.queue import ENDPOINTS

ADMIN = "root"


def _ruled(*names: str, **more: Any) -> Settings:
    keys = [{"name": name, "sha256": hash_key(name), "admin": name == ADMIN} for name in names]
    return settings("redis://x", keys=keys, **more)


def _put(redis: Redis, id: str, of: str, **wanted: Any) -> None:
    endpoint = Endpoint(id=id, url="https://x.test/", owner=hash_key(of) if of else "", wanted=wanted)
    redis.hset(ENDPOINTS, id, msgspec.json.encode(endpoint))
    redis.incr(VERSION)


def _verdict(of: str) -> events.Happened:
    intent: Mapping[str, str] = {"owner": hash_key(of), "model": "m"} if of else {"model": "m"}
    return events.of_verdict(unverified("a" * 32, "backlog", intent, 5.5))


def _told(directory: Directory, happened: events.Happened, rules: Settings) -> list[str]:
    among = directory.refresh(rules)
    return [endpoint.id for endpoint, _ in directory.told(happened, rules, among)]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a subscription was read, and how often one was asked."""
    counts = {"read": 0, "asked": 0}
    read, asked = Subscription.model_validate, Subscription.wants_verdict

    def counting_read(found: Any) -> Subscription:
        counts["read"] += 1
        return read(found)

    def counting_asked(self: Subscription, verification: Mapping[str, Any]) -> str | None:
        counts["asked"] += 1
        return asked(self, verification)

    monkeypatch.setattr(Subscription, "model_validate", counting_read)
    monkeypatch.setattr(Subscription, "wants_verdict", counting_asked)
    return counts


def test_a_verdict_costs_nothing_for_webhooks_that_cannot_hear_of_it(redis: Redis, counted: dict[str, int]) -> None:
    others = [f"key{number}" for number in range(20)]
    rules = _ruled("mine", *others)
    for number, name in enumerate(others):
        _put(redis, f"we_{number}a", name)
        _put(redis, f"we_{number}b", name, everyone=False)
    _put(redis, "we_mine", "mine")
    _put(redis, "we_ops", "")
    directory = Directory(redis)
    for _ in range(30):
        assert _told(directory, _verdict("mine"), rules) == ["we_ops", "we_mine"]
    reads, asked = counted["read"], counted["asked"]
    assert asked == 2 * 30
    assert reads <= 2 * 42
    # One more is read, not all of them again.
    _put(redis, "we_new", "key0")
    directory.refresh(rules)
    assert counted["read"] - reads <= 2


@pytest.mark.parametrize(
    ("of", "told"),
    [
        ("ann", {"we_ann", "we_ops", "we_all", SETTINGS}),
        ("root", {"we_all", "we_root", "we_ops", SETTINGS}),
        ("gone", {"we_ops", "we_all", SETTINGS}),
        ("", {"we_ops", "we_all", SETTINGS}),
        (None, {"we_ops", "we_all", "we_root", SETTINGS}),
    ],
)
def test_who_is_told(redis: Redis, of: str | None, told: set[str]) -> None:
    """Everybody once: of a key its own, the operator's, and admins' that take everyone's; of a backend admins'."""
    rules = _ruled("ann", "bob", ADMIN, webhook={"url": "https://x.test/", "secret": "whsec_" + "A" * 32})
    for name in ("ann", "bob", "gone", ADMIN):
        _put(redis, f"we_{name}", name)
    _put(redis, "we_all", ADMIN, everyone=True)
    _put(redis, "we_was_admin", "bob", everyone=True)
    _put(redis, "we_ops", "")
    redis.hset(ENDPOINTS, "we_broken", b"{")
    happened = events.Happened("e" * 32, "b1", "m", 5.5, {}, "backend.suspect") if of is None else _verdict(of)
    found = _told(Directory(redis), happened, rules)
    assert set(found) == told
    assert len(found) == len(told)


def test_what_changed_is_heard_of(redis: Redis) -> None:
    rules = _ruled("ann")
    directory = Directory(redis)
    assert _told(directory, _verdict("ann"), rules) == []
    _put(redis, "we_ann", "ann")
    assert _told(directory, _verdict("ann"), rules) == ["we_ann"]
    assert directory.find("we_ann", rules) is not None
    _put(redis, "we_ann", "ann", events=["verification.rejected"])
    assert _told(directory, _verdict("ann"), rules) == []
    redis.hdel(ENDPOINTS, "we_ann")
    redis.incr(VERSION)
    assert directory.find("we_ann", rules) is None
    # A key that is gone hears of nothing at once where the settings have it, else within `KEYS_SECONDS`.
    _put(redis, "we_ann", "ann")
    assert _told(directory, _verdict("ann"), _ruled("bob")) == []


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_no_thread_misses_a_webhook_while_others_change(redis: Redis, valkey_url: str) -> None:
    rules = _ruled("ann")
    for number in range(100):
        _put(redis, f"we_{number}", "ann")
    directory = Directory(redis)
    directory.refresh(rules)
    changing = True

    def deliver(number: int) -> bool:
        found = []
        while changing:
            found.append(directory.find(f"we_{number}", rules) is not None)
        return all(found)

    def tell() -> bool:
        told = []
        while changing:
            told.append(len(_told(directory, _verdict("ann"), rules)))
        return min(told, default=100) >= 100

    with ThreadPoolExecutor(5) as pool, Redis.from_url(valkey_url) as other:
        senders = [pool.submit(deliver, 20 * number) for number in range(4)] + [pool.submit(tell)]
        for number in range(100, 200):
            _put(other, f"we_{number}", "ann")
        changing = False
        assert all(each.result() for each in senders)
