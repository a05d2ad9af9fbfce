"""How many streams, how fast, and what is measured of a burst of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FIRST_SECONDS = 0.02
_PATIENT_ROUNDS = 3
"""Every so many rounds the slowest arm has its turn at the largest load; every round of it would be half of all."""


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of burst.

    Attributes:
        streams: at once; a single one comes `repeats` times, each after the one before.
        tokens: chunks of one answer, one every `interval` seconds after the first one at `FIRST_SECONDS`.
        spread: seconds over which the requests of a burst are due, at random times.
        repeats: bursts per arm and round.
        spacing: seconds from one request to the next, instead, where nobody is to find anything idle.
    """

    streams: int
    tokens: int
    interval: float
    spread: float
    repeats: int = 1
    spacing: float = 0.0

    def offsets(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """When the requests of a burst are due, seconds from its start."""
        if self.spacing:
            return self.spacing * np.arange(self.streams, dtype=np.float64)
        return np.sort(rng.uniform(0.0, self.spread, self.streams)) if self.spread else np.zeros(self.streams)

    def has(self, arm: str, number: int) -> bool:
        """Whether an arm has this load in that round."""
        if arm != "litellm":
            return True
        # A request takes it longer than the next one is away.
        return not self.spacing and (self.streams < 1000 or number % _PATIENT_ROUNDS == 1)

    @property
    def warm(self) -> bool:
        """Whether one request follows the other so closely that neither process nor core sleeps for long."""
        return self.spacing > 0

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
        return self.spread + self.spacing * self.streams + FIRST_SECONDS + self.tokens * self.interval

    @property
    def rate(self) -> float:
        """Chunks per second while every stream flows."""
        return self.streams / self.interval


LOADS: Mapping[int, Load] = {
    load.streams: load
    for load in (
        Load(1, 24, 0.01, 0.0, repeats=10),
        Load(32, 150, 0.01, 0.4),
        Load(200, 40, 0.05, 0.8),
        Load(1000, 20, 0.5, 5.0),
    )
}

WARM = Load(200, 4, 0.001, 0.0, spacing=0.005)
