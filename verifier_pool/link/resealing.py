"""Seals anew what is kept for good and was sealed with another key than is sealed with now: what signs receipts, keys
of backends, secrets of webhooks. Evidence and what comes of it expires by itself.

So a key of `storage.encryption_keys` that is not the first can be taken out once evidence under it is gone.
"""

from __future__ import annotations

import logging
import time
from typing import cast

from redis import Redis

from policies.errors import SealError
from verifier_pool.link import endpoints, overlays, signing
from verifier_pool.link.queue import ENDPOINTS, PREFIX
from verifier_pool.link.sealing import Sealer

logger = logging.getLogger(__name__)

RESEALING = PREFIX + "resealing"
EVERY_SECONDS = 600
"""Processes look in turn so often, and none before it is so old: until then others may be restarted with the key that
is new, and could not open what was sealed with it."""

_REPLACE = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""
"""Lua: another value for a field of a hash, unless it has another one already."""
_KEPT = {
    signing.RECEIPT_KEYS: signing.resealed,
    overlays.BACKENDS: overlays.resealed,
    ENDPOINTS: endpoints.resealed,
}
"""By the hash, what makes of a field's name and value another value, or None."""


class Resealing:
    """The turn of one process."""

    def __init__(self, redis: Redis, sealer: Sealer) -> None:
        self._redis = redis
        self._sealer = sealer
        self._next = time.monotonic() + EVERY_SECONDS

    def look(self) -> None:
        """Do it if it is time, and nobody else did. Redis's own errors pass through."""
        if not self._sealer.seals or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY_SECONDS
        if self._redis.set(RESEALING, b"", nx=True, ex=EVERY_SECONDS // 2):
            reseal(self._redis, self._sealer)


def reseal(redis: Redis, sealer: Sealer) -> int:
    """Seal anew whatever was not sealed with the first key; returns how many values that were. What cannot be opened
    stays, and the log says so. Redis's own errors pass through."""
    done = 0
    for hash, again in _KEPT.items() if sealer.seals else ():
        for field, stored in cast("dict[bytes, bytes]", redis.hgetall(hash)).items():
            name = field.decode(errors="surrogateescape")
            try:
                value = again(name, stored, sealer)
            except (SealError, ValueError) as error:
                logger.error("%s of %s cannot be sealed anew: %s", ascii(name), hash, error)
                continue
            if value is not None:
                done += int(cast(int, redis.eval(_REPLACE, 1, hash, field, stored, value)))
    if done:
        logger.info("sealed anew with the first of storage.encryption_keys: %d values", done)
    return done
