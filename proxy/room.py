"""How much the recorder holds, and Redis for the workers, so that no backend crowds out another's evidence."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from redis import Redis

from policies import audit
from policies.errors import ApiError
from policies.settings import Settings
from proxy.metrics import Metrics
from verifier_pool.link.queue import waiting_bytes_key, waiting_key

_LOOK_SECONDS = 0.05
_FAR_SECONDS = 0.5
_FAR = 0.1
"""Below this share of every limit it is looked less often: what all proxies let in meanwhile is less than the rest."""
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


class Overloaded(ApiError):
    """The memory of this process for unfinished answers is full, which is nobody's fault but ours."""

    status = 503
    code = "overloaded"
    retry_after = 1.0


@dataclass(slots=True)
class _Holder:
    """A key, or a backend: its shares, and what they hold together."""

    shares: set[Share] = field(default_factory=set)
    held: int = 0


class Share:
    """What one answer, or one request, holds of it, as long as its context lasts."""

    def __init__(self, holding: Holding, holders: dict[str, _Holder], name: str) -> None:
        self.held = 0
        self._holding = holding
        self._holders = holders
        self._name = name
        self._holder = _Holder()
        self._open = False

    def __enter__(self) -> Self:
        self._holder = self._holders.setdefault(self._name, self._holder)
        self._holder.shares.add(self)
        self._holding.shares += 1
        self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self._leave()

    def _take(self, size: int) -> bool:
        """It holds `size` bytes now; whether that is more than before."""
        more = size - self.held
        self._holding.held += more
        self._holder.held += more
        self.held = size
        return more > 0

    def _leave(self) -> None:
        self._take(0)
        self._open = False
        self._holding.shares -= 1
        self._holder.shares.remove(self)
        if not self._holder.shares:
            del self._holders[self._name]


class Body(Share):
    """A request's."""

    def fits(self, size: int) -> bool:
        """It holds `size` bytes now. False when it took more, and its key has more than is left for those of others."""
        if not self._take(size):
            return True
        left = self._holding.most // 2 - sum(holder.held for holder in self._holders.values())
        if self._holder.held > left:
            return False
        self._holding.make_room()
        return True


class Part(Share):
    """An answer's, in the task that reads it. Where it has to give way that task is interrupted, and the context raises
    Overloaded."""

    def __init__(self, holding: Holding, holders: dict[str, _Holder], name: str) -> None:
        super().__init__(holding, holders, name)
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self.given_up = self._interrupted = False

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        self.__exit__()
        # A client that left meanwhile has cancelled the task, too.
        if self._interrupted:
            assert self._task is not None
            if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
                raise _overloaded() from error

    def weigh(self, size: int) -> None:
        """It holds `size` bytes now. Raises Overloaded where it is the one that has to give way."""
        if not self.given_up and self._take(size):
            self._holding.make_room()
        if self.given_up:
            raise _overloaded()

    def give_up(self) -> None:
        """It holds nothing any more."""
        self._leave()
        self.given_up = True
        if self._task is not None and self._task is not asyncio.current_task():
            self._interrupted = True
            self._task.cancel()


class Holding:
    """Bytes of unfinished answers and of requests' bodies in the memory of one process, on its event loop.

    Never more than `most` together. Of answers, the largest of the backend that holds the most gives way: so no backend
    that holds less than an even share ever does, whatever the others send. Bodies have half of it, of which each key
    may hold as much as it leaves to others; they give way to nobody, for their requests are being served.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = self.shares = 0
        self.keys: dict[str, _Holder] = {}
        self.backends: dict[str, _Holder] = {}

    def body(self, key: str) -> Body:
        """A request's share; all of one key are weighed together."""
        return Body(self, self.keys, key)

    def answer(self, backend: str) -> Part:
        """An answer's share; all of one backend are weighed together."""
        return Part(self, self.backends, backend)

    def make_room(self) -> None:
        """Give up answers as long as too much is held."""
        while self.held > self.most and self.backends:
            largest = max(self.backends.values(), key=lambda holder: holder.held)
            if not largest.held:
                return
            part = max(largest.shares, key=lambda share: share.held)
            assert isinstance(part, Part)
            part.give_up()


def _overloaded() -> Overloaded:
    return Overloaded("the proxy holds too much of unfinished answers; try again")


class Backlog:
    """What waits in Redis for its verdict, in number and in bytes, and whether more of it is let in."""

    def __init__(self, redis: Redis, settings: Settings, metrics: Metrics) -> None:
        self._redis = redis
        self._rules = settings.verification
        self._names = {backend.name for backend in settings.backends}
        self._metrics = metrics
        self._chance = random.SystemRandom()
        self._soon = self._stale = 0.0
        self._waiting: Counter[str] = Counter()
        self._held: Counter[str] = Counter()

    def admits(self, backend: str, size: int, before: Sequence[int]) -> bool:
        """Whether the workers keep up with this backend, or chance is on this response's side. Redis is asked
        twice a second, near a limit more often; what was let in meanwhile is counted here.

        Args:
            size: bytes of its evidence.
            before: those of the backend's responses that are let in already and not in Redis yet.
        """
        now = time.monotonic()
        if now >= self._stale or backend not in self._waiting or (now >= self._soon and not self._is_far):
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

    @property
    def _is_far(self) -> bool:
        """Whether nobody comes near a limit."""
        items, held = self._waiting.total(), self._held.total()
        return items < _FAR * self._rules.max_backlog and held < _FAR * self._rules.max_backlog_bytes

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
        self._soon = time.monotonic() + _LOOK_SECONDS
        self._stale = self._soon + _FAR_SECONDS - _LOOK_SECONDS
        self._metrics.waits(self._waiting, self._held)


def _admits(chance: random.Random, waiting: int, total: int, backends: int, limit: int) -> bool:
    """See audit.admits. Chance is a system call, and only asked where it decides."""
    return 2 * total < limit or audit.admits(waiting, total, backends, limit, chance.random())
