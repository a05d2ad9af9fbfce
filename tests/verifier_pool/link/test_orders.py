"""What admins ask of the workers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from redis import Redis

from verifier_pool.link import orders
from verifier_pool.link.orders import ORDERS, Order


def test_each_is_done_once_and_answered(redis: Redis) -> None:
    done: list[str] = []
    lock = threading.Lock()

    def do(order: Order) -> list[dict[str, Any]]:
        with lock:
            done.append(order.id)
        return [{"job": "x", "done": True}]

    ids = [orders.give(redis, "requeue", ["x"], "key:boss") for _ in range(20)]
    threads = [threading.Thread(target=orders.carry_out, args=(redis, do)) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(done) == sorted(ids)
    assert orders.done(redis, ids[0]) == [{"job": "x", "done": True}]
    assert redis.llen(ORDERS) == 0
    assert 0 < redis.ttl(f"{ORDERS.removesuffix('orders')}ordered:{ids[0]}") <= 300


def test_one_whose_worker_dies_is_done_by_another(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_: Order) -> list[dict[str, Any]]:
        raise KeyboardInterrupt

    id = orders.give(redis, "requeue", None, "key:boss")
    with pytest.raises(KeyboardInterrupt):
        orders.carry_out(redis, die)
    assert orders.carry_out(redis, lambda order: []) == 0
    (taken,) = redis.keys("*:taken")
    assert 0 < redis.ttl(taken) <= 60
    redis.delete(taken)
    assert orders.carry_out(redis, lambda order: [{"job": order.id}]) == 1
    assert orders.done(redis, id) == [{"job": id}]
    assert orders.carry_out(redis, lambda order: []) == 0


def test_nobody_waits_for_ever_and_nothing_heaps_up(redis: Redis) -> None:
    id = orders.give(redis, "drop", None, "key:boss")
    assert orders.done(redis, id) is None
    for _ in range(200):
        orders.give(redis, "drop", None, "key:boss")
    assert redis.llen(ORDERS) == 100
    assert 0 < redis.ttl(ORDERS) <= 300


def test_rubbish_and_what_is_late_is_dropped(redis: Redis) -> None:
    redis.lpush(ORDERS, b"{", b"\xff", b'{"id":"a","action":"burn","ids":null,"by":"x","at":1}')
    redis.lpush(ORDERS, b'{"id":"a","action":"drop","ids":null,"by":"x","at":1}')
    assert orders.carry_out(redis, lambda order: []) == 0
    assert redis.llen(ORDERS) == 0
