"""What is kept of deliveries that are over."""

from __future__ import annotations

from typing import Any

from redis import Redis

from policies.settings import Settings
from tests.verifier_pool.toy import settings
from verifier_pool.link import deliveries, delivery_log, endpoints, events
from verifier_pool.link.deliveries import Delivery
from verifier_pool.link.endpoints import SETTINGS


def _state(redis: Redis, rules: Settings) -> dict[str, Any]:
    endpoint = endpoints.of_settings(rules)
    assert endpoint is not None
    return delivery_log.state(redis, endpoint)


def _told(redis: Redis, rules: Settings, count: int) -> list[Delivery]:
    endpoint = endpoints.of_settings(rules)
    assert endpoint is not None
    made = []
    for _ in range(count):
        happened = events.Happened("a" * 32, "", "", 5.5, {}, "t")
        made += deliveries.plan(redis, rules.deliveries, (), happened, [(endpoint, "t")]).ids
    found = [deliveries.find(redis, id) for id in made]
    return [each for each in found if each is not None]


def _ended(redis: Redis, rules: Settings, delivery: Delivery, status: str) -> None:
    deliveries.end(
        redis, delivery, rules.deliveries, 9.0, status=status, outcome="bad" if status == "failed" else "good"
    )


def test_what_failed_stays_however_much_arrives(redis: Redis) -> None:
    """A delivery fails for good days after it was made, when many later ones have arrived."""
    webhook = {"url": "https://x.test/", "secret": "whsec_" + "A" * 32}
    rules = settings("redis://x", webhook=webhook, deliveries={"log": 3, "log_ttl": 100})
    bad, *good = _told(redis, rules, 8)
    for each in good:
        _ended(redis, rules, each, "delivered")
    _ended(redis, rules, bad, "failed")
    for each in _told(redis, rules, 5):
        _ended(redis, rules, each, "delivered")
    assert [each.number for each in delivery_log.log(redis, SETTINGS)] == [13, 12, 11, 1]
    assert [each.id for each in delivery_log.log(redis, SETTINGS, status="failed")] == [bad.id]
    assert 0 < redis.ttl(deliveries.failed_key(SETTINGS)) <= 100
    assert deliveries.again(redis, rules.deliveries, (), bad.id) is None
    assert (redis.zcard(deliveries.failed_key(SETTINGS)), _state(redis, rules)["waiting"]) == (0, 1)
    _ended(redis, rules, bad, "delivered")
    assert _state(redis, rules)["dropped"] == 0
    delivery_log.forget(redis, SETTINGS)
    assert redis.keys("*webhook-delivery:*") == []


def test_what_failed_is_bounded_too_and_what_goes_is_counted(redis: Redis) -> None:
    webhook = {"url": "https://x.test/", "secret": "whsec_" + "A" * 32}
    rules = settings("redis://x", webhook=webhook, deliveries={"waiting": 3, "log": 1})
    for first in (0, 3):
        failing = _told(redis, rules, 3)
        assert [each.number for each in failing] == [first + 1, first + 2, first + 3]
        for each in reversed(failing):
            _ended(redis, rules, each, "failed")
            # Never what has become a dead letter just now.
            assert deliveries.find(redis, each.id) is not None
    assert redis.zcard(deliveries.failed_key(SETTINGS)) == 3
    assert _state(redis, rules)["dropped"] == 3
    assert len(delivery_log.log(redis, SETTINGS)) == 3
