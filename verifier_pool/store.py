"""Redis as the workers see it: evidence and intents in, each verdict out exactly once."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, cast

import orjson
from redis import Redis

from policies.verification import Verification, encode
from verifier_pool.queue import (
    AUDIT_SECRET,
    OPEN,
    OUTBOX,
    STORE_VERDICT,
    evidence_key,
    intent_key,
    store_verdict_args,
    store_verdict_keys,
    verdict_key,
)


class Store:
    """Reads and writes under the names of `verifier_pool.queue`. Redis's own errors pass through.

    Args:
        verdict_ttl: seconds a verdict is kept.
        webhook: whether verdicts also go to the outbox.
    """

    def __init__(self, redis: Redis, *, verdict_ttl: int, webhook: bool = False) -> None:
        self.redis = redis
        self._verdict_ttl = verdict_ttl
        self._webhook = webhook
        self._script = redis.register_script(STORE_VERDICT)

    def evidence(self, id: str) -> bytes | None:
        """Packed evidence, or None once it expired."""
        return cast("bytes | None", self.redis.get(evidence_key(id)))

    def evidence_exists(self, id: str) -> bool:
        """Whether the evidence has not expired."""
        return bool(self.redis.exists(evidence_key(id)))

    def intent(self, id: str) -> dict[str, Any] | None:
        """The intent, or None when it is gone or unreadable."""
        return _json(self.redis.get(intent_key(id)))

    def verdict(self, id: str) -> Verification | None:
        """The verification with its owner, or None while there is none."""
        return _json(self.redis.get(verdict_key(id)))

    def decided(self, id: str) -> bool:
        """Whether a verdict is stored."""
        return bool(self.redis.exists(verdict_key(id)))

    def settle(self, verification: Mapping[str, Any]) -> bool:
        """Store a verdict, close its id and announce it, all at once. False when another came first."""
        id = verification["id"]
        at = verification["decided"] if self._webhook else None
        args = store_verdict_args(id, encode(verification), self._verdict_ttl, at)
        return bool(self._script(keys=store_verdict_keys(id), args=args))

    def overdue(self, now: float, limit: int) -> list[str]:
        """Ids without a verdict whose time is up, oldest first."""
        return [id.decode() for id in cast("list[bytes]", self.redis.zrangebyscore(OPEN, "-inf", now, 0, limit))]

    def postpone(self, id: str, until: float) -> None:
        """Look again later; an id that was closed meanwhile stays closed."""
        self.redis.zadd(OPEN, {id: until}, xx=True)

    def outbox(self, limit: int) -> list[str]:
        """Ids whose verdict has not been handed to the webhook queue, oldest first."""
        return [id.decode() for id in cast("list[bytes]", self.redis.zrange(OUTBOX, 0, limit - 1))]

    def sent(self, id: str) -> None:
        """Take an id out of the outbox."""
        self.redis.zrem(OUTBOX, id)

    def audit_secret(self) -> bytes:
        """The secret that picks audits, made once and shared by all workers."""
        self.redis.set(AUDIT_SECRET, secrets.token_bytes(32), nx=True)
        return cast(bytes, self.redis.get(AUDIT_SECRET))


def _json(data: Any) -> dict[str, Any] | None:
    if data is None:
        return None
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
