"""What verdicts rest on beside the evidence, in Redis: a case per response, and what many cases share by its hash."""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Sequence

from redis import Redis
from redis.exceptions import OutOfMemoryError

from policies import receipt
from policies.case import Shared, pack, sha256
from policies.errors import BundleError, ReceiptError
from policies.evidence import Evidence
from policies.judging import Grounds
from verifier_pool.link.queue import case_key, part_key
from verifier_pool.link.receipts import receipt_of
from verifier_pool.link.sealing import Sealer

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 60.0
"""How long a part that was there is taken to be there still. It expires later than that, but Redis may forget."""


class Parts:
    """Keeps cases, and profiles and added tokens where they are missing. Redis's own errors pass through.

    Args:
        ttl: seconds that a case is kept.
    """

    def __init__(self, redis: Redis, ttl: int, sealer: Sealer | None = None) -> None:
        self._redis = redis
        self._ttl = ttl
        self._sealer = sealer or Sealer()
        self._shared: dict[str, Shared] = {}
        self._seen: dict[str, float] = {}

    def keep(self, choices: Sequence[Evidence], grounds: Grounds, *, retained: bool = True) -> bytes:
        """Keep what the verdict of a response rests on beside the evidence, if it is `retained`.

        Returns:
            The case (`policies.case`), which the receipt names by its hash; nothing where it is too large to be one. It
            is there before the verdict is, and so is what it shares with others, unless Redis is full.
        """
        if grounds.spelling is not None:
            for choice in choices:
                grounds.spelling.pieces(choice.output_ids)  # what a report shows
        first = choices[0]
        shared = self._of(first.model, grounds)
        try:
            case = pack(choices, grounds, shared)
        except BundleError as error:
            _warn(first.id, error)
            return b""
        try:
            if retained:
                self._keep(shared)
                self._store(case_key(first.id, sha256(case)), case)
        except OutOfMemoryError as error:
            _warn(first.id, error)
        return case

    def withdraw(self, id: str, case: bytes) -> None:
        """Another verdict came first: this case goes, whose words may be of an answer that is not to be kept, unless it
        is the one that the receipt of that verdict names."""
        stored = receipt_of(self._redis, id)
        if stored is None or _named(stored.token) != sha256(case):
            self._redis.unlink(case_key(id, sha256(case)))

    def _store(self, key: str, case: bytes) -> None:
        self._redis.set(key, self._sealer.seal(case, key.encode()), ex=self._ttl)

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


def _named(token: str) -> str | None:
    """The case that a receipt names."""
    payload = token.split(".")[1]
    try:
        said = receipt.decode(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (ReceiptError, ValueError):
        return None
    found = said["sha256"]["replay"]
    return found if isinstance(found, str) else None
