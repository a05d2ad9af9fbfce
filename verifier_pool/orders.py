"""What an admin asks of the workers, who alone can do it: to queue failed jobs anew, or to drop them.

    orders        list of orders, JSON, the latest first
    ordered:ID    what became of one, JSON, for a few minutes

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

from verifier_pool.queue import PREFIX

logger = logging.getLogger(__name__)

ORDERS = PREFIX + "orders"
PATIENCE = 10.0
"""Seconds that whoever asks waits."""
_EXPIRES = 300
_MOST = 100
_POLL = 0.1

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


def wait(redis: Redis, id: str, seconds: float = PATIENCE) -> list[dict[str, Any]] | None:
    """What became of an order; None while nobody has done it. Polls."""
    deadline = time.monotonic() + seconds
    while (data := cast("bytes | None", redis.get(_key(id)))) is None:
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL)
    return cast("list[dict[str, Any]]", orjson.loads(data))


def carry_out(redis: Redis, do: Doing) -> int:
    """Do what is ordered; returns how many orders that was. Each is taken by one worker; late ones are dropped."""
    done = 0
    while (data := cast("bytes | None", redis.rpop(ORDERS))) is not None:
        try:
            order = _order.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            logger.error("an order cannot be read; dropped")
            continue
        if order.at < time.time() - _EXPIRES:
            continue
        redis.set(_key(order.id), orjson.dumps(do(order)), ex=_EXPIRES)
        done += 1
    return done


def _key(id: str) -> str:
    return f"{PREFIX}ordered:{id}"
