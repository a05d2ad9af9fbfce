"""What is kept of a webhook's deliveries, how it is doing, and what ends either."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from redis import Redis

from verifier_pool.link import deliveries
from verifier_pool.link.deliveries import Delivery
from verifier_pool.link.endpoints import Endpoint

_CHUNK = 100


def log(
    redis: Redis, endpoint: str, *, limit: int = 50, before: int | None = None, status: str | None = None
) -> list[Delivery]:
    """A webhook's deliveries, the latest first, those that are not over among them.

    Args:
        before: a sequence number; only those before it.
        status: only those with it.
    """
    found: list[Delivery] = []
    for delivery in _walk(redis, endpoint, before):
        if status in (None, delivery.status):
            found.append(delivery)
        if len(found) == limit:
            break
    return found


def _walk(redis: Redis, endpoint: str, before: int | None) -> Iterator[Delivery]:
    top = "+inf" if before is None else f"({before}"
    while True:
        pipeline = redis.pipeline()
        for key in deliveries.all_keys(endpoint):
            pipeline.zrevrangebyscore(key, top, "-inf", 0, _CHUNK)
        ids = sorted({id.decode() for part in pipeline.execute() for id in part}, key=_number, reverse=True)[:_CHUNK]
        if not ids:
            return
        pipeline = redis.pipeline(transaction=False)
        for id in ids:
            pipeline.hgetall(deliveries.delivery_key(id))
        for id, stored in zip(ids, pipeline.execute(), strict=True):
            if (delivery := deliveries.read(id, stored)) is not None:
                yield delivery
        top = f"({_number(ids[-1])}"


def state(redis: Redis, endpoint: Endpoint) -> dict[str, Any]:
    """How a webhook is doing, as JSON."""
    pipeline = redis.pipeline(transaction=False)
    pipeline.hgetall(deliveries.state_key(endpoint.id))
    pipeline.zcard(deliveries.waiting_key(endpoint.id))
    pipeline.zcard(deliveries.sending_key(endpoint.id))
    stored, waiting, sending = pipeline.execute()
    held = {name.decode(): value.decode() for name, value in stored.items()}
    off = held.get("disabled") if held.get("disabled_url") == endpoint.url else None
    return {
        "disabled": off is not None,
        "disabled_reason": off,
        "waiting": waiting,
        "sending": sending,
        "sequence": int(held.get("sequence", 0)),
        "dropped": int(held.get("dropped", 0)),
        "failures": int(held.get("failures", 0)),
        "failing_since": deliveries.second(held.get("failing_since")),
        "paused_until": deliveries.second(held.get("paused")),
        "delivered_at": deliveries.second(held.get("delivered_at")),
    }


def resume(redis: Redis, endpoint: str) -> bool:
    """Send to a webhook again that was switched off or rests; false where it was neither."""
    names = ("disabled", "disabled_url", "disabled_at", "failing_since", "failures", "paused")
    return bool(redis.hdel(deliveries.state_key(endpoint), *names))


def forget(redis: Redis, endpoint: str) -> None:
    """Drop everything of a webhook that is gone. Jobs of its deliveries find nothing and end."""
    for key in deliveries.all_keys(endpoint):
        while ids := cast("list[bytes]", redis.zrange(key, 0, 499)):
            redis.unlink(*(deliveries.delivery_key(id.decode()) for id in ids))
            redis.zrem(deliveries.UNQUEUED, *ids)
            redis.zrem(key, *ids)
    redis.unlink(deliveries.state_key(endpoint), deliveries.sending_key(endpoint))


def _number(id: str) -> int:
    return int(id.rpartition("-")[2])
