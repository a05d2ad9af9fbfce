"""Turns that webhooks take: nobody's slow receivers hold up others', and nothing is left of who is gone."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import pytest
from redis import Redis

from policies.settings import Settings
from tests.verifier_pool.receiver import Receiver, listening, status
from tests.verifier_pool.test_webhooks import ID, hooked, run
from tests.verifier_pool.toy import settings
from verifier_pool import webhooks, worker
from verifier_pool.link import deliveries, delivery_log, endpoints, events
from verifier_pool.link.deliveries import Delivery
from verifier_pool.link.endpoints import SETTINGS
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import ENDPOINTS, PREFIX, WEBHOOK_QUEUE
from verifier_pool.link.sealing import Sealer


class Board:
    """Deliveries to the webhooks of several client keys, begun and ended by hand."""

    def __init__(self, redis: Redis, rules: Settings) -> None:
        self._redis, self._rules = redis, rules.deliveries
        self.most = max(1, self._rules.senders // 2)

    def made(self, owner: str, webhook: str, count: int = 1) -> list[Delivery]:
        endpoint = endpoints.Endpoint(id=webhook, url="https://x.test/", owner=owner)
        self._redis.hset(ENDPOINTS, webhook, msgspec.json.encode(endpoint))
        happened = events.Happened(ID, "", "", 5.5, {}, "t")
        ids = [
            id
            for _ in range(count)
            for id in deliveries.plan(self._redis, self._rules, (), happened, [(endpoint, "t")]).ids
        ]
        found = [deliveries.find(self._redis, id) for id in ids]
        return [each for each in found if each is not None]

    def begun(self, found: Sequence[Delivery]) -> list[Delivery]:
        """Those that are sent."""
        return [each for each in found if deliveries.begin(self._redis, each, "", self.most, 1.0)[0] == "send"]

    def ended(self, found: Sequence[Delivery], *, slow: bool) -> None:
        for each in found:
            deliveries.end(self._redis, each, self._rules, 2.0, status="delivered", outcome="good", slow=slow)


def test_one_key_never_has_more_than_half_of_the_senders(redis: Redis, valkey_url: str) -> None:
    board = Board(redis, settings(valkey_url))
    greedy = [each for number in range(10) for each in board.made("greedy", f"we_{number}", 3)]
    assert len(board.begun(greedy)) == board.most == 2
    assert len(board.begun(board.made("quick", "we_quick"))) == 1
    # Of the operator each webhook stands for itself.
    assert len(board.begun(board.made("", "we_a") + board.made("", "we_b"))) == 2


def test_slow_keys_share_half_of_the_senders_and_have_one_each(redis: Redis, valkey_url: str) -> None:
    board = Board(redis, settings(valkey_url))
    slow = {owner: board.made(owner, f"we_{owner}0", 5) + board.made(owner, f"we_{owner}1", 5) for owner in "abcd"}
    for owner in slow:
        first = board.begun(slow[owner][:1])
        board.ended(first, slow=True)
        assert len(first) == 1
    # Quick in between: it counts as slow all the same.
    again = board.begun(slow["a"][1:2])
    board.ended(again, slow=False)
    assert [len(board.begun(slow[owner][2:])) for owner in slow] == [1, 1, 0, 0]
    quick = board.begun(board.made("quick", "we_quick", 3))
    assert len(quick) == board.most
    assert all(redis.ttl(key) > 0 for key in redis.keys(f"{PREFIX}webhook-*sending*"))
    redis.delete(*redis.keys(f"{PREFIX}webhook-slow:*"))
    board.ended(quick, slow=False)
    assert len(board.begun(slow["c"][2:])) == board.most


def test_a_slow_success_counts_and_a_quick_one_does_not(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(Receiver(status(200))) as receiver:
        rules = hooked(valkey_url, receiver)
        monkeypatch.setattr(webhooks, "SLOW", float("inf"))
        run(redis, rules, ID)
        assert redis.keys(f"{PREFIX}webhook-slow:*") == []
        monkeypatch.setattr(webhooks, "SLOW", 0.0)
        run(redis, rules, "b" * 32)
    assert redis.keys(f"{PREFIX}webhook-slow:*") == [f"{PREFIX}webhook-slow:{SETTINGS}".encode()]
    assert redis.keys(f"{PREFIX}webhook-*sending*") == []


def test_webhooks_of_one_key_take_the_turns_of_one(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    board = Board(redis, rules)
    for number in range(5):
        board.made("greedy", f"we_{number}", 4)
    board.made("quick", "we_quick", 3)
    deliveries.queue_up(redis, rules.deliveries)
    order = FairQueue(WEBHOOK_QUEUE, connection=redis).take(8)
    assert sum("quick" in id for id in order) == 3


def test_a_webhook_that_cannot_be_read_is_not_gone(redis: Redis, valkey_url: str) -> None:
    """A newer release wrote it; a sender of that, or this one after its upgrade, delivers."""
    with listening(Receiver(status(200))) as receiver:
        rules = settings(valkey_url, deliveries={"networks": ["127.0.0.0/8"], "ports": []})
        endpoint = endpoints.Endpoint(
            id="we_new",
            url=receiver.url,
            secrets=(endpoints.sealed(Sealer(), "we_new", "whsec_" + "A" * 32),),
        )
        readable = msgspec.json.encode(endpoint)
        redis.hset(ENDPOINTS, "we_new", readable)
        (id,) = deliveries.plan(
            redis, rules.deliveries, (), events.Happened("a" * 32, "", "", 5.5, {}, "t"), [(endpoint, "t")]
        ).ids
        redis.hset(ENDPOINTS, "we_new", b'{"id": "we_new", "wanted": {"phase_of_the_moon": 1}}')
        worker.run_webhooks(rules, threading.Event(), burst=True)
        waiting = deliveries.find(redis, id)
        assert waiting is not None
        assert (waiting.status, waiting.tries, receiver.requests) == ("waiting", 0, [])
        redis.hset(ENDPOINTS, "we_new", readable)
        queue = FairQueue(WEBHOOK_QUEUE, connection=redis)
        redis.zadd(queue.scheduled_job_registry.key, dict.fromkeys(queue.scheduled_job_registry.get_job_ids(), 0))
        worker.run_webhooks(rules, threading.Event(), burst=True)
    assert len(receiver.requests) == 1


def test_of_a_webhook_that_was_removed_nothing_is_written(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url).deliveries
    endpoint = endpoints.Endpoint(id="we_x", url="https://x.test/")
    stored = msgspec.json.encode(endpoint)
    happened = events.Happened(ID, "", "", 5.5, {}, "t")

    def plan() -> deliveries.Planned:
        return deliveries.plan(redis, rules, (), happened, [(endpoint, "t")])

    redis.hset(ENDPOINTS, "we_x", stored)
    assert plan() == (["we_x-1"], 0)
    under_way = deliveries.find(redis, "we_x-1")
    assert under_way is not None
    redis.delete(ENDPOINTS)
    delivery_log.forget(redis, "we_x")
    # By a sender that read the directory before.
    assert plan() == ([], 0)
    for outcome in ("good", "bad", "gone"):
        deliveries.end(redis, under_way, rules, 5.5, status="failed", outcome=outcome, url=endpoint.url)
    assert redis.keys(f"{PREFIX}webhook-*") == []
