"""Says how far a calibration is, and about how long it will still take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from benchmarks.calibration.plan import Shot

EVERY_SECONDS = 2.0

Say = Callable[[str], None]


class Progress:
    """Counts answers and replays. Time left comes from what each took so far, per token and per replay."""

    def __init__(self, shots: Sequence[Shot], say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._total = len(shots)
        self._left = {shot.index: _weight(shot) for shot in shots}
        self._unreplayed = len(shots)
        self._asked = _Rate(clock)
        self._replayed = _Rate(clock)
        self._spoken = clock()
        self._step = ""

    def known(self, shot: Shot, *, replayed: bool) -> None:
        """This one was kept by an earlier run."""
        self._left.pop(shot.index, None)
        self._unreplayed -= replayed

    def step(self, what: str) -> None:
        """A new part begins."""
        self._step = what
        self._asked.start()
        self._replayed.start()
        self._speak(force=True)

    def asked(self, shot: Shot) -> None:
        """One answer came, or was given up."""
        self._asked.add(self._left.pop(shot.index, 0.0))
        self._speak()

    def replayed(self, count: int) -> None:
        """So many answers were replayed."""
        self._unreplayed -= count
        self._replayed.add(count)
        self._speak()

    def words(self) -> str:
        """One line."""
        done = self._total - len(self._left)
        replayed = self._total - self._unreplayed
        return f"{self._step}; {done} of {self._total} answers, {replayed} replayed{_left(self.seconds_left())}"

    def seconds_left(self) -> float | None:
        """None until both kinds of work have been seen, or are no longer needed."""
        asking = self._asked.seconds(sum(self._left.values()))
        replaying = self._replayed.seconds(self._unreplayed)
        return None if asking is None or replaying is None else asking + replaying

    def _speak(self, *, force: bool = False) -> None:
        now = self._clock()
        if force or now - self._spoken >= EVERY_SECONDS:
            self._spoken = now
            self._say(self.words())


class _Rate:
    """Seconds per unit of one kind of work."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._seconds = 0.0
        self._units = 0.0

    def start(self) -> None:
        self._since = self._clock()

    def add(self, units: float) -> None:
        now = self._clock()
        self._seconds += now - self._since
        self._since = now
        self._units += units

    def seconds(self, units: float) -> float | None:
        if units <= 0:
            return 0.0
        return units * self._seconds / self._units if self._units > 0 else None


def _weight(shot: Shot) -> float:
    """How long a request takes beside others: its tokens, fewer where many decode together."""
    return float(shot.max_tokens / shot.arm.concurrency**0.7)


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 90:
        return f", about {max(1, round(seconds))} s left"
    return f", about {round(seconds / 60)} min left"
