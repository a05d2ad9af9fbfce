"""What verdicts rest on beside the evidence, in Redis: a case per response, and what many cases share by its hash."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from redis import Redis
from redis.exceptions import OutOfMemoryError

from policies.case import Shared, pack, sha256
from policies.errors import BundleError
from policies.evidence import Evidence
from policies.judging import Grounds
from verifier_pool.link.queue import case_key, part_key
from verifier_pool.link.receipts import KeptCase
from verifier_pool.link.sealing import Sealer

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 60.0
"""How long a part that was there is taken to be there still. It expires later than that, but Redis may forget."""


class Parts:
    """Makes cases, and keeps profiles and added tokens where they are missing. Redis's own errors pass through.

    Args:
        ttl: seconds that a case is kept.
    """

    def __init__(self, redis: Redis, ttl: int, sealer: Sealer | None = None) -> None:
        self._redis = redis
        self._ttl = ttl
        self._sealer = sealer or Sealer()
        self._shared: dict[str, Shared] = {}
        self._seen: dict[str, float] = {}

    def case_of(self, choices: Sequence[Evidence], grounds: Grounds) -> bytes:
        """What the verdict of a response rests on beside the evidence (`policies.case`), which the receipt names by its
        hash; nothing where it is too large to be one."""
        if grounds.spelling is not None:
            for choice in choices:
                grounds.spelling.pieces(choice.output_ids)  # what a report shows
        first = choices[0]
        try:
            return pack(choices, grounds, self._of(first.model, grounds))
        except BundleError as error:
            _warn(first.id, error)
            return b""

    def keep(self, choice: Evidence, grounds: Grounds, case: bytes) -> KeptCase | None:
        """Keep what the case shares with others, and return what is to be stored of it, in the step that stores its
        verdict; None where there is no case, or Redis is full."""
        if not case:
            return None
        try:
            self._keep(self._of(choice.model, grounds))
        except OutOfMemoryError as error:
            _warn(choice.id, error)
            return None
        key = case_key(choice.id, sha256(case))
        return KeptCase(key, self._sealer.seal(case, key.encode()), self._ttl)

    def _of(self, model: str, grounds: Grounds) -> Shared:
        """What the cases of a model share, which stays the same while this lives."""
        found = self._shared.get(model)
        if found is None:
            spelling = grounds.spelling
            found = Shared.of(grounds.profile, spelling, getattr(spelling, "sha256", ""))
            self._shared[model] = found
        return found

    def _keep(self, shared: Shared) -> None:
        """Have it there for as long as a case that is written now."""
        now = time.monotonic()
        again = min(AGAIN_SECONDS, self._ttl / 2)
        for name, part in shared.parts.items():
            if now < self._seen.get(name, float("-inf")) + again:
                continue
            if not self._redis.expire(part_key(name), 2 * self._ttl):
                self._redis.set(part_key(name), part, ex=2 * self._ttl)
            self._seen[name] = now


def _warn(id: str, error: Exception) -> None:
    """A verdict does without."""
    logger.warning("no evidence of verification %s can be handed out: %s", id, type(error).__name__)
