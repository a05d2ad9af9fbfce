"""A circuit breaker: whether a backend that fails requests is asked at all. Arithmetic on times that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from policies.settings import BreakerSettings

State = Literal["closed", "open", "half_open"]
STATES: tuple[State, ...] = get_args(State)

Failure = Literal["unreachable", "timeout", "disconnected", "status", "broken"]
"""How a request failed: no connection, silence, a connection closed before the answer, a status of 500 or more, an
answer that broke off."""

REACHED: frozenset[Failure] = frozenset(("disconnected", "status", "broken"))
"""Failures of a backend that is there: asking it costs no time, and a client may have brought them about."""

_JITTER = 0.25
_MOST_DOUBLINGS = 60


@dataclass(frozen=True, slots=True)
class Entry:
    """A request that was let in: in which epoch of the breaker, how many answers had ended well by then, and whether it
    is the one that tries a backend out."""

    epoch: int
    answers: int
    probe: bool = False


@dataclass(slots=True)
class Breaker:
    """Closed → open after `rules.failures` failures in a row → half-open: one request tries → closed, or open for twice
    as long. When the one that tries hears nothing for `rules.longest` seconds, another one may, too.

    What requests of an earlier epoch have to say is no news: the breaker has opened since they were let in. An answer
    that begins closes the breaker, so that nobody waits for its end, but only one that ends well takes back what speaks
    against the backend: one that breaks off every answer stays one failure away from being open again. A request that
    takes too long while others are answered is itself what takes so long: that is no failure of the backend.

    Attributes:
        chance: a random number in [0, 1), so that several proxies do not try at the same moment.
        failures: in a row.
        opened: openings in a row, without an answer that ended well.
        until: when it may be tried (again), on the clock of the times given.
        kind: the failure that opened it last.
    """

    rules: BreakerSettings
    chance: Callable[[], float]
    state: State = "closed"
    failures: int = 0
    opened: int = 0
    until: float = 0.0
    kind: Failure | None = None
    epoch: int = 0
    _answers: int = 0

    def admits(self, now: float) -> bool:
        """Whether a request may be sent: when closed, and when it is time that one tries."""
        return self.state == "closed" or now >= self.until

    @property
    def reached(self) -> bool:
        """Whether it is out although it is there."""
        return self.state != "closed" and self.kind in REACHED

    def enter(self, now: float) -> Entry:
        """A request is sent. One that is not admitted is sent for want of anybody else."""
        if self.state == "closed" or not self.admits(now):
            return Entry(self.epoch, self._answers)
        self.state, self.until = "half_open", now + self.rules.longest
        self.epoch += 1
        return Entry(self.epoch, self._answers, probe=True)

    def began(self, entry: Entry) -> bool:
        """The answer began. Returns whether the state changed."""
        if entry.epoch != self.epoch or self.state == "closed":
            return False
        self.state = "closed"
        self.failures = self.rules.failures - 1
        return True

    def finished(self, entry: Entry) -> bool:
        """The answer ended well. Returns whether the state changed."""
        self._answers += 1
        if entry.epoch != self.epoch:
            return False
        changed = self.state != "closed"
        self.state = "closed"
        self.failures = self.opened = 0
        return changed

    def failed(self, entry: Entry, kind: Failure, now: float) -> bool:
        """The request failed. Returns whether the state changed."""
        if entry.epoch != self.epoch:
            return False
        if self.state == "closed":
            if kind == "timeout" and entry.answers != self._answers:
                return False
            self.failures += 1
            if self.failures < self.rules.failures:
                return False
        elif not entry.probe:
            return False
        self._open(kind, now)
        return True

    def left(self, entry: Entry, now: float) -> None:
        """The request is over, and whatever it had to say was said: if that was nothing, another one may try."""
        if entry.probe and entry.epoch == self.epoch and self.state == "half_open":
            self.until = now

    def _open(self, kind: Failure, now: float) -> None:
        self.state, self.kind = "open", kind
        self.opened += 1
        self.epoch += 1
        grown = self.rules.open_seconds * 2.0 ** min(self.opened - 1, _MOST_DOUBLINGS)
        self.until = now + min(grown, self.rules.longest) * (1 - _JITTER * self.chance())
