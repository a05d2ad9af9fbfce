"""The deadlines of a proxy's reads from backends, which pass when a test says so: then no time-out has to be short, and
whatever has to come in time does."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import pytest

from proxy.relay.clock import Deadline
from tests.support.fake_backend import PeerCloses, Received, Step


class Deadlines:
    """Those that are made from here on. An attempt has one until it has the head of an answer, and then another one.

    Attributes:
        moved: which of them, in the order in which they were made, was moved to which moment, in seconds on the
            monotonic clock.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moved: list[tuple[int, float]] = []
        self._made: dict[Deadline, int] = {}
        self._over: set[Deadline] = set()
        self._all = False
        self._until = Deadline.until
        monkeypatch.setattr(Deadline, "until", self._noting())

    def silence(self, *steps: Step) -> Callable[[Received], list[Step]]:
        """The script of a backend that says this, less than a head, and nothing more: whoever waits then has waited for
        too long."""

        def script(_: Received) -> list[Step]:
            self._pass()
            return [*steps, PeerCloses()]

        return script

    def end(self) -> None:
        """Whatever is waited for from here on has been waited for for too long."""
        self._all = True
        self._pass()

    def _pass(self) -> None:
        for deadline in list(self._made):
            if deadline._due is not None:
                self._over.add(deadline)
                deadline._loop.call_soon_threadsafe(self._ring, deadline)

    def _ring(self, deadline: Deadline) -> None:
        if deadline._due is not None:
            self._until(deadline, 0.0)

    def _noting(self) -> Callable[[Deadline, float | None], None]:
        @wraps(self._until)
        def noting(deadline: Deadline, when: float | None) -> None:
            number = self._made.setdefault(deadline, len(self._made))
            self._until(deadline, when)
            if when is not None:
                self.moved.append((number, when))
                # Asked after it was moved, as whoever ends them looks for those that are: one of both sees the other.
                if self._all or deadline in self._over:
                    self._until(deadline, 0.0)

        return noting
