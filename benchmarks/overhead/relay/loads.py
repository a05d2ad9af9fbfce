"""How many streams, how fast, and what is measured of a burst of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FIRST_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of burst.

    Attributes:
        streams: at once; a single one comes `repeats` times, each after the one before.
        tokens: chunks of one answer, one every `interval` seconds after the first one at `FIRST_SECONDS`.
        spread: seconds over which the requests of a burst are due, at random times.
        repeats: bursts per arm and round.
    """

    streams: int
    tokens: int
    interval: float
    spread: float
    repeats: int = 1

    @property
    def window(self) -> tuple[float, float]:
        """Seconds from a burst's start between which every stream flows and none begins or ends."""
        return (
            self.spread + FIRST_SECONDS + 2.5 * self.interval,
            FIRST_SECONDS + (self.tokens - 1.5) * self.interval,
        )

    @property
    def seconds(self) -> float:
        """How long a burst takes where nothing is late."""
        return self.spread + FIRST_SECONDS + self.tokens * self.interval

    @property
    def rate(self) -> float:
        """Chunks per second while every stream flows."""
        return self.streams / self.interval


LOADS: Mapping[int, Load] = {
    load.streams: load
    for load in (
        Load(1, 24, 0.01, 0.0, repeats=20),
        Load(32, 150, 0.01, 0.4),
        Load(200, 40, 0.05, 0.8),
        Load(1000, 20, 0.5, 5.0),
    )
}
