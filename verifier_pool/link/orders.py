"""What an admin asks of the workers, who alone can do it: to queue failed jobs anew, or to drop them.

    orders        list of orders, JSON, the latest first
    ordered:ID    what became of one, JSON, for a few minutes; `ordered:ID:taken` while a worker is at it

The first CPU worker that comes round does it. Where none runs nothing happens, and the order expires.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import msgspec
import orjson
from redis import Redis

from verifier_pool.link.queue import PREFIX

logger = logging.getLogger(__name__)

ORDERS = PREFIX + "orders"
PATIENCE = 10.0
"""Seconds that whoever asks waits."""
_EXPIRES = 300
_TAKEN = 60
"""Seconds that a worker has for an order before it counts as dead."""
_MOST = 100

Action = Literal["requeue", "drop"]


class Order(msgspec.Struct, frozen=True):
    """To do something with dead letters: those of these ids, or all (None). `by` whom, `at` which Unix second."""

    id: str
    action: Action
    ids: tuple[str, ...] | None
    by: str
    at: float


Doing = Callable[[Order], list[dict[str, Any]]]
_order = msgspec.json.Decoder(Order)


def give(redis: Redis, action: Action, ids: Sequence[str] | None, by: str) -> str:
    """Give an order; returns its id."""
    order = Order(secrets.token_hex(8), action, None if ids is None else tuple(ids), by, time.time())
    pipeline = redis.pipeline(transaction=True)
    pipeline.lpush(ORDERS, msgspec.json.encode(order))
    pipeline.ltrim(ORDERS, 0, _MOST - 1)
    pipeline.expire(ORDERS, _EXPIRES)
    pipeline.execute()
    return order.id


def done(redis: Redis, id: str) -> list[dict[str, Any]] | None:
    """What became of an order; None while nobody has done it."""
    data = cast("bytes | None", redis.get(_key(id)))
    return None if data is None else cast("list[dict[str, Any]]", orjson.loads(data))


def carry_out(redis: Redis, do: Doing) -> int:
    """Do what is ordered; returns how many orders that was. Each is taken by one worker; late ones are dropped.

    An order stays until it is done: one whose worker died over it is another's after `_TAKEN` seconds.
    """
    count = 0
    for data in reversed(cast("list[bytes]", redis.lrange(ORDERS, 0, -1))):
        try:
            order = _order.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            logger.error("an order cannot be read; dropped")
            redis.lrem(ORDERS, 0, cast("Any", data))
            continue
        if order.at < time.time() - _EXPIRES:
            redis.lrem(ORDERS, 0, cast("Any", data))
            continue
        if not redis.set(f"{_key(order.id)}:taken", b"1", nx=True, ex=_TAKEN) or redis.exists(_key(order.id)):
            continue
        found = orjson.dumps(do(order))
        pipeline = redis.pipeline(transaction=True)
        pipeline.set(_key(order.id), found, ex=_EXPIRES)
        pipeline.lrem(ORDERS, 0, cast("Any", data))
        pipeline.execute()
        count += 1
    return count


def _key(id: str) -> str:
    return f"{PREFIX}ordered:{id}"
