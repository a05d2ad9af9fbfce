"""How much the recorder holds, and Redis for the workers, so that no backend crowds out another's evidence."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from redis import Redis

from policies import audit
from policies.errors import UpstreamFailed
from policies.settings import Settings
from proxy.metrics import Metrics
from verifier_pool.queue import waiting_bytes_key, waiting_key

_LOOK_SECONDS = 0.05
_IDLE_SECONDS = 5.0


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
                and _admits(self._chance, self._items[backend], items, backends, self._max_items)
                and _admits(self._chance, self._bytes[backend], held, backends, self._max_bytes)
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


@dataclass(slots=True)
class _Holder:
    """Whoever has shares, and what they hold together."""

    shares: int = 0
    held: int = 0


class Share:
    """What one answer, or one request, holds of it."""

    def __init__(self, holding: Holding, name: str | None) -> None:
        self._holding = holding
        self._name = name
        self._holder = _Holder()
        self._held = 0

    def __enter__(self) -> Share:
        if self._name is not None:
            self._holder = self._holding.holders.setdefault(self._name, self._holder)
        self._holder.shares += 1
        self._holding.shares += self._holder.shares == 1
        return self

    def __exit__(self, *_: object) -> None:
        self.fits(0)
        self._holder.shares -= 1
        if not self._holder.shares:
            self._holding.shares -= 1
            if self._name is not None:
                del self._holding.holders[self._name]

    async def __aenter__(self) -> Share:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()

    def fits(self, size: int) -> bool:
        """It holds `size` bytes now. False when it took more, and its holder has more than is left for all others."""
        holding, more = self._holding, size - self._held
        holding.held += more
        self._holder.held += more
        self._held = size
        return more <= 0 or self._holder.held <= holding.most - holding.held

    def weigh(self, size: int) -> None:
        """As `fits`. Raises UpstreamFailed where it does not."""
        if not self.fits(size):
            raise UpstreamFailed("the proxy holds too much of unfinished answers", code="overloaded")


class Holding:
    """Bytes of unfinished answers and of requests in the memory of one process, on its event loop.

    Never more than `most` together: whoever takes more has to leave as much as that is then his. So one alone may have
    half, and however many have what they could get, the next one gets something, too.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = self.shares = 0
        self.holders: dict[str, _Holder] = {}

    def share(self, name: str | None = None) -> Share:
        """One answer's, as long as its context lasts; or one request's, which has one with all others of that name."""
        return Share(self, name)


class Backlog:
    """What waits in Redis for its verdict, in number and in bytes, and whether more of it is let in."""

    def __init__(self, redis: Redis, settings: Settings, metrics: Metrics) -> None:
        self._redis = redis
        self._rules = settings.verification
        self._names = {backend.name for backend in settings.backends}
        self._metrics = metrics
        self._chance = random.SystemRandom()
        self._stale = 0.0
        self._waiting: Counter[str] = Counter()
        self._held: Counter[str] = Counter()

    def admits(self, backend: str, size: int, before: Sequence[int]) -> bool:
        """Whether the workers keep up with this backend, or chance is on this response's side. Redis is asked some
        times a second; what was let in meanwhile is counted here.

        Args:
            size: bytes of its evidence.
            before: those of the backend's responses that are let in already and not in Redis yet.
        """
        if time.monotonic() >= self._stale or backend not in self._waiting:
            self._look(backend)
            self._waiting[backend] += len(before)
            self._held[backend] += sum(before)
        crowd = sum(name == backend or count > 0 for name, count in self._waiting.items())
        fits = all(
            _admits(self._chance, waiting, total, crowd, limit)
            for waiting, total, limit in (
                (self._waiting[backend], self._waiting.total(), self._rules.max_backlog),
                (self._held[backend] + size, self._held.total() + size, self._rules.max_backlog_bytes),
            )
        )
        if fits:
            self._waiting[backend] += 1
            self._held[backend] += size
        return fits

    def renew(self, settings: Settings) -> None:
        """Take over other limits and backends."""
        self._rules = settings.verification
        self._names = {backend.name for backend in settings.backends}

    def refresh(self) -> None:
        """Look again where nobody asked for a while, for who reads the metrics: autoscalers go by what waits, also when
        nothing comes any more."""
        if time.monotonic() >= self._stale + _IDLE_SECONDS:
            self._look()

    def _look(self, *more: str) -> None:
        since = time.time() - self._rules.evidence_ttl
        # One that was taken out of the settings is asked for until nothing of it waits any more.
        names = sorted(self._names.union(more, (name for name, count in self._waiting.items() if count > 0)))
        pipeline = self._redis.pipeline(transaction=False)
        for name in names:
            pipeline.zcount(waiting_key(name), since, "+inf")
        for name in names:
            pipeline.get(waiting_bytes_key(name))
        found = [int(each or 0) for each in pipeline.execute()]
        self._waiting = Counter(dict(zip(names, found[: len(names)], strict=True)))
        self._held = Counter(dict(zip(names, found[len(names) :], strict=True)))
        self._stale = time.monotonic() + _LOOK_SECONDS
        self._metrics.waits(self._waiting, self._held)


def _admits(chance: random.Random, waiting: int, total: int, backends: int, limit: int) -> bool:
    """See audit.admits. Chance is a system call, and only asked where it decides."""
    return 2 * total < limit or audit.admits(waiting, total, backends, limit, chance.random())
