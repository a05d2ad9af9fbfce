"""How far a run is and how long it will take: one line on a terminal, one every few seconds in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

LOG_EVERY = 15.0
_WIDTH = 24


class Clock:
    """Knows when a run has to end, and learns what a unit of each kind of work takes.

    Args:
        limit: seconds the run may take, counted from now; 0 is no limit.
    """

    def __init__(self, limit: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._limit = limit
        self._seconds: dict[str, float] = {}
        self._units: dict[str, float] = {}

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began

    def learn(self, kind: str, units: float, seconds: float) -> None:
        """So many units of this kind took so long."""
        self._units[kind] = self._units.get(kind, 0.0) + units
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    def expected(self, kind: str, units: float) -> float | None:
        """Seconds such work will take; None before any of its kind was seen."""
        known = self._units.get(kind)
        return None if not known else units * self._seconds[kind] / known

    def fits(self, kind: str, units: float) -> bool:
        """Whether such work would end within the limit; what was never seen fits while there is time at all."""
        if not self._limit:
            return True
        return self.elapsed + (self.expected(kind, units) or 0.0) < self._limit

    def left(self, work: Mapping[str, float]) -> float | None:
        """Seconds all that work will take, from what is known; None before anything was seen."""
        known = [seconds for kind, units in work.items() if (seconds := self.expected(kind, units)) is not None]
        return sum(known) if known or not work else None


class Bar:
    """A progress bar with time left, of the benchmark of this name."""

    def __init__(self, name: str, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._out = out if out is not None else sys.stderr
        self._live = self._out.isatty()
        self._clock = clock
        self._spoken = -LOG_EVERY
        self._dirty = False

    def show(self, what: str, done: int, total: int, left: float | None, *, last: bool = False) -> None:
        """Say where the run is; in a log only every few seconds."""
        now = self._clock()
        if not self._live and not last and now - self._spoken < LOG_EVERY:
            return
        self._spoken = now
        filled = _WIDTH * done // total if total else _WIDTH
        bar = "█" * filled + "░" * (_WIDTH - filled)
        line = f"{bar} {done}/{total} {what}{_words(left)}"
        self._out.write(f"\r\033[K{line}" if self._live else f"bench {self._name}: {line}\n")
        self._dirty = self._live
        self._out.flush()

    def say(self, text: str) -> None:
        """A line of its own."""
        self._out.write(("\n" if self._dirty else "") + f"bench {self._name}: {text}\n")
        self._dirty = False
        self._out.flush()


def _words(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 90:
        return f", about {max(1, round(seconds))} s left"
    return f", about {round(seconds / 60)} min left"
