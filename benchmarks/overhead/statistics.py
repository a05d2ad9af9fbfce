"""From samples in rounds to figures with their spread. Pure: arrays in, values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rounds = Mapping[int, NDArray[np.float64]]
"""Samples by round; every array has at least one sample."""

RESAMPLES = 500
SEED = 7


@dataclass(frozen=True, slots=True)
class Figure:
    """A value and the quartiles of its spread, all in one unit."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """`value (low to high)`."""
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def median_of_medians(rounds: Rounds) -> Figure:
    """Median over rounds of each round's median, with the quartiles over rounds."""
    return spread([float(np.median(samples)) for samples in rounds.values()])


def added_median(base: Rounds, arm: Rounds) -> Figure:
    """What `arm` adds to `base`: each round's medians are subtracted first, so that a slow minute hits both."""
    shared = sorted(base.keys() & arm.keys())
    return spread([float(np.median(arm[index]) - np.median(base[index])) for index in shared])


def added_quantile(base: Rounds, arm: Rounds, q: float) -> Figure:
    """What `arm` adds to `base`'s quantile `q` (0 to 1) over all rounds' samples together.

    A round alone has too few samples for a tail. The quartiles come from drawing whole rounds with
    replacement (the same rounds for both), since samples of one round share that minute's disturbances.
    """
    shared = sorted(base.keys() & arm.keys())

    def difference(drawn: Sequence[int]) -> float:
        arm_q, base_q = (np.quantile(np.concatenate([side[index] for index in drawn]), q) for side in (arm, base))
        return float(arm_q - base_q)

    rng = np.random.default_rng(SEED)
    draws = [difference(rng.choice(shared, len(shared)).tolist()) for _ in range(RESAMPLES)]
    low, high = np.quantile(draws, [0.25, 0.75])
    return Figure(difference(shared), float(low), float(high))


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept of the least-squares line through at least two different x. Raises ValueError."""
    x, y = np.array(points, float).T
    if np.ptp(x) == 0:
        raise ValueError("a line needs two different x")
    slope, intercept = np.polyfit(x, y, 1)
    return float(slope), float(intercept)


def spread(values: Sequence[float]) -> Figure:
    """Median and quartiles."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return Figure(float(middle), float(low), float(high))
