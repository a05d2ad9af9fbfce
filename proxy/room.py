"""How much the recorder holds, and Redis for the workers, so that no backend crowds out another's evidence."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence

from redis import Redis

from policies import audit
from policies.settings import Settings
from proxy.metrics import Metrics
from verifier_pool.queue import waiting_bytes_key, waiting_key


class Room:
    """Room for `max_items` responses and `max_bytes` of what their taps hold; any thread may ask.

    Beyond half of it, what is let in is left to chance within each backend's share (`policies.audit.admits`).
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._max_items, self._max_bytes = max_items, max_bytes
        self._items: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._lock = threading.Lock()
        # Whoever could foresee it would cheat while nobody looks.
        self._chance = random.SystemRandom()

    def take(self, backend: str, size: int) -> bool:
        """Take a place for a response of `size` bytes if there is one."""
        with self._lock:
            items, held = self._items.total(), self._bytes.total()
            backends = len({*self._items, backend})
            fits = (
                items < self._max_items
                and held + size <= self._max_bytes
                and audit.admits(self._items[backend], items, backends, self._max_items, self._chance.random())
                and audit.admits(self._bytes[backend], held, backends, self._max_bytes, self._chance.random())
            )
            if fits:
                self._items[backend] += 1
                self._bytes[backend] += size
            return fits

    def leave(self, backend: str, size: int) -> None:
        """Give it back."""
        with self._lock:
            self._items[backend] -= 1
            self._bytes[backend] -= size
            if not self._items[backend]:
                del self._items[backend], self._bytes[backend]


class Backlog:
    """What waits in Redis for its verdict, in number and in bytes, and whether more of it is let in."""

    def __init__(self, redis: Redis, settings: Settings, metrics: Metrics) -> None:
        self._redis = redis
        self._rules = settings.verification
        self._names = {backend.name for backend in settings.backends}
        self._metrics = metrics
        self._chance = random.SystemRandom()

    def admits(self, backend: str, size: int, before: Sequence[int]) -> bool:
        """Whether the workers keep up with this backend, or chance is on this response's side.

        Args:
            size: bytes of its evidence.
            before: those of the backend's responses that are let in already and not in Redis yet.
        """
        since = time.time() - self._rules.evidence_ttl
        names = sorted(self._names | {backend})
        pipeline = self._redis.pipeline(transaction=False)
        for name in names:
            pipeline.zcount(waiting_key(name), since, "+inf")
        for name in names:
            pipeline.get(waiting_bytes_key(name))
        found = [int(each or 0) for each in pipeline.execute()]
        waiting = dict(zip(names, found[: len(names)], strict=True))
        held = dict(zip(names, found[len(names) :], strict=True))
        self._metrics.waits(waiting, held)
        waiting[backend] += len(before)
        held[backend] += size + sum(before)
        crowd = sum(name == backend or count > 0 for name, count in waiting.items())
        return all(
            audit.admits(counts[backend], sum(counts.values()), crowd, limit, self._chance.random())
            for counts, limit in ((waiting, self._rules.max_backlog), (held, self._rules.max_backlog_bytes))
        )
