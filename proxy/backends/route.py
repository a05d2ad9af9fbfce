"""One request's way through the backends of its model."""

from __future__ import annotations

import math

from proxy.backends.backend import Backend
from proxy.backends.group import Group
from proxy.backends.turn import Turn


class Route:
    """Who takes a request, and who takes it next when that one fails. Each is chosen only when it is needed, by how
    things are then; nobody has a second chance.

    Attributes:
        hint: the backend that an admin named, the only one asked, quarantined or not, well or not; but its limit holds.
        waited: seconds in the queue.
    """

    def __init__(
        self, group: Group, *, key: int | None = None, hint: Backend | None = None, without: Backend | None = None
    ) -> None:
        self.hint = hint
        self._group = group
        self._key = key
        # By name: a backend whose settings change meanwhile has had its chance all the same.
        self._tried = set() if without is None else {without.name}
        self._began = False
        self.waited = 0.0

    async def take(self, most: float = math.inf) -> Turn | None:
        """A place at the best backend there is; None when the request failed elsewhere and nobody is left.

        The first time it stands in the queue while all are at their limit, for `most` seconds at the most. Enter the
        turn before anything else is awaited: its place is taken.

        Raises:
            BackendUnavailable: nobody can be asked, or nobody had a place in time.
        """
        self._group.serve_waiting()
        backend = self.best()
        first, self._began = not self._began, True
        if backend is not None:
            turn = Turn(backend)
        elif not first:
            return None
        elif self._crowded():
            turn = await self._wait(most)
        else:
            raise self._group.refusal()
        self._tried.add(turn.backend.name)
        return turn

    async def _wait(self, most: float) -> Turn:
        since = self._group.clock()
        try:
            return await self._group.wait(self, most)
        finally:
            self.waited = self._group.clock() - since

    @property
    def another(self) -> bool:
        """Whether there is one left that could take the request now."""
        return self.hint is None and self._group.has_others(self._tried)

    @property
    def open(self) -> bool:
        """Whether there is one left that could take it, now or once it has a place."""
        return self.another or self._crowded()

    def accepts(self, backend: Backend) -> bool:
        """Whether the request may be sent there now."""
        return not backend.full and self._allows(backend)

    def _allows(self, backend: Backend) -> bool:
        """The same, whether it has a place or not."""
        if backend.name in self._tried:
            return False
        return backend is self.hint or (self.hint is None and self._group.ranked(backend))

    def best(self) -> Backend | None:
        """Where the request is best sent now, None when no backend has a place for it."""
        if self.hint is None:
            return self._group.pick(self._key, self._tried)
        return self.hint if self.accepts(self.hint) else None

    def _crowded(self) -> bool:
        """Whether it would have a backend if that were not at its limit."""
        return any(backend.full and self._allows(backend) for backend in self._group.members)
