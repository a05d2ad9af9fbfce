"""The backends of one model: which of them takes a request, and who waits until one can."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Protocol

from policies.errors import BackendUnavailable
from policies.settings import RoutingSettings
from proxy.backends.backend import RESTING, Backend
from proxy.backends.rendezvous import Points, choose, points_of
from proxy.backends.turn import Turn

_outstanding = attrgetter("outstanding")
_NONE_LEFT = "no backend of this model is available; try again later"
_AT_LIMIT = "every backend of this model is at its limit; try again soon"


class Waiting(Protocol):
    """A request that waits for a backend."""

    def accepts(self, backend: Backend) -> bool:
        """Whether it may be sent there now."""

    def best(self) -> Backend | None:
        """Where it is best sent now."""


class _Row:
    """Backends among which only the policy decides."""

    __slots__ = ("members", "points")

    def __init__(self, members: Sequence[Backend], points: Points) -> None:
        self.members = members
        self.points = points

    def those(self, fits: Callable[[Backend], bool]) -> _Row:
        """The part of them that fits."""
        at = [n for n, backend in enumerate(self.members) if fits(backend)]
        return _Row([self.members[n] for n in at], self.points[at])


class Group:
    """Every backend of a model.

    Those of the best rank (`Backend.rank`) are asked first, suspects among them last, except in `suspect_share` of the
    turns that would be their own. Those that are unwell or failing are asked only while there is nobody else, however
    busy: a health endpoint that is broken must not end a service that works.
    """

    def __init__(
        self,
        model: str,
        members: Sequence[Backend],
        rules: RoutingSettings,
        *,
        suspect_share: float,
        clock: Callable[[], float],
        chance: random.Random,
    ) -> None:
        self.model = model
        self.clock = clock
        self.waiting: deque[tuple[Waiting, asyncio.Future[Turn]]] = deque()
        self._chance = chance
        self._tiers: list[tuple[int, _Row, _Row]] = []
        self._turn = 0
        self.renew(members, rules, suspect_share=suspect_share)

    def renew(self, members: Sequence[Backend], rules: RoutingSettings, *, suspect_share: float) -> None:
        """Route among other backends, or by other rules. Whoever waits, waits on; where nobody is left it is over."""
        self.members = members
        self.rules = rules
        self._suspect_share = suspect_share
        self._points = points_of([backend.name for backend in members])
        self._until = -math.inf
        for backend in members:
            backend.changed = self._changed
            backend.freed = self._freed
        if members:
            self.serve_waiting()
            return
        for _, place in self.waiting:
            if not place.done():
                place.set_exception(self.refusal())

    def pick(self, key: int | None, tried: Collection[str]) -> Backend | None:
        """The backend that takes a request now, None when none can.

        Args:
            key: what the request has in common with others (`affinity.key_of`); None spreads it.
            tried: names of backends that had their chance at this request.
        """
        crowded = False
        for rank, rest, suspects in self._ranked():
            if crowded and rank > RESTING:
                return None
            if rest.members and suspects.members and not tried:
                chosen = self._suspects_turn(rest, suspects)
                if chosen is not None:
                    return chosen
            for row in (rest, suspects):
                open_to = row.those(lambda backend: backend.name not in tried) if tried else row
                found = self._best(open_to, key)
                if found is not None:
                    return found
                crowded |= rank <= RESTING and bool(open_to.members)
        return None

    def has_others(self, tried: Collection[str]) -> bool:
        """Whether `pick` would find one."""
        crowded = False
        for rank, rest, suspects in self._ranked():
            if crowded and rank > RESTING:
                return False
            for row in (rest, suspects):
                for backend in row.members:
                    if backend.name not in tried:
                        if not backend.full:
                            return True
                        crowded |= rank <= RESTING
        return False

    def ranked(self, backend: Backend) -> bool:
        """Whether a backend may be asked at all."""
        return backend.rank(self.clock()) is not None

    async def wait(self, request: Waiting, most: float = math.inf) -> Turn:
        """Stand in the queue until a backend has a place for the request. First come, first served.

        Raises BackendUnavailable when the queue is full, or after `queue_seconds`, or `most` if that is less.
        """
        if len(self.waiting) >= self.rules.queue:
            raise BackendUnavailable(_AT_LIMIT)
        place: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        entry = (request, place)
        self.waiting.append(entry)
        try:
            async with asyncio.timeout(min(most, self.rules.queue_seconds)):
                return await place
        except BaseException as error:
            if place.done() and not place.cancelled():
                # It got a place in the moment in which it gave up.
                place.result().close()
            if isinstance(error, TimeoutError):
                raise BackendUnavailable(_AT_LIMIT) from error
            raise
        finally:
            if entry in self.waiting:
                self.waiting.remove(entry)

    def serve_waiting(self) -> None:
        """Give those who wait what is free by now: a backend may be back because time has passed."""
        if self.waiting:
            for backend in self.members:
                self._freed(backend)

    def refusal(self) -> BackendUnavailable:
        """What to say when nobody can be asked, and when to come again."""
        now = self.clock()
        times = [
            backend.breaker.until - now
            for backend in self.members
            if not backend.closed and backend.breaker.state == "open"
        ]
        return BackendUnavailable(_NONE_LEFT, retry_after=max(1.0, min(times, default=1.0)))

    def _ranked(self) -> list[tuple[int, _Row, _Row]]:
        """Rank by rank, the suspects by themselves; made again only when something changed."""
        now = self.clock()
        if now >= self._until:
            alike: dict[tuple[int, bool], list[int]] = {}
            for at, backend in enumerate(self.members):
                rank = backend.rank(now)
                if rank is not None:
                    alike.setdefault((rank, backend.standing.state == "suspect"), []).append(at)
            self._tiers = [
                (rank, self._row(alike.get((rank, False), [])), self._row(alike.get((rank, True), [])))
                for rank in sorted({rank for rank, _ in alike})
            ]
            self._until = min((backend.next_change(now) for backend in self.members), default=math.inf)
        return self._tiers

    def _row(self, at: list[int]) -> _Row:
        return _Row([self.members[n] for n in at], self._points[at])

    def _best(self, row: _Row, key: int | None) -> Backend | None:
        """By the policy; None when all are at their limit."""
        found = self._by_policy(row, key)
        if found is None or not found.full:
            return found
        return self._by_policy(row.those(lambda backend: not backend.full), key)

    def _by_policy(self, row: _Row, key: int | None) -> Backend | None:
        members = row.members
        if len(members) < 2:
            return members[0] if members else None
        if key is not None:
            loads = list(map(_outstanding, members))
            return members[choose(row.points, key, loads, self.rules.load_bound)]
        self._turn += 1
        first = self._turn % len(members)
        return min([*members[first:], *members[:first]], key=_outstanding)

    def _suspects_turn(self, rest: _Row, suspects: _Row) -> Backend | None:
        """The suspect whose turn this is, if it is one's: each has one in as many turns as there are backends free, and
        gets its share of them, however busy it is, so that it stays observed."""
        free = [backend for backend in suspects.members if not backend.full]
        others = sum(not backend.full for backend in rest.members)
        if not free or not others:
            return None
        mine = self._chance.randrange(len(free) + others)
        if mine >= len(free) or self._chance.random() >= self._suspect_share:
            return None
        return free[mine]

    def _changed(self) -> None:
        self._until = -math.inf
        self.serve_waiting()

    def _freed(self, backend: Backend) -> None:
        """Whoever has waited longest among those that may be sent there gets the place, before anybody sees it free."""
        for entry in tuple(self.waiting):
            request, place = entry
            if backend.full:
                return
            if not place.done() and request.accepts(backend) and (best := request.best()) is not None:
                # A place that changes the backend's rank serves those who wait, and this one no longer does.
                self.waiting.remove(entry)
                place.set_result(Turn(best))
