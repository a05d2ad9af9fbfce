"""From samples in rounds to figures with bootstrap intervals. Pure: arrays in, values out.

Samples of one round share that minute's disturbances, so what is drawn anew is whole rounds, with replacement, and the
same rounds for what is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rounds = Mapping[int, NDArray[np.float64]]
"""Samples by round; every array has at least one sample."""

RESAMPLES = 500
SEED = 7
LEVELS = (0.025, 0.975)
"""Of the intervals: 95 %."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A value and its interval, all in one unit."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """`value (low to high)`."""
        return f"{self.value:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"

    @property
    def noise(self) -> float:
        """Half the interval's width."""
        return (self.high - self.low) / 2


def median(values: Sequence[float]) -> Figure:
    """Median of one value per round."""
    kept = np.asarray(values, float)
    return _figure(float(np.median(kept)), np.median(kept[_draws(len(kept))], axis=1))


def median_of_medians(rounds: Rounds) -> Figure:
    """Median over rounds of each round's median."""
    return median([float(np.median(samples)) for samples in rounds.values()])


def quantile(rounds: Rounds, q: float) -> Figure:
    """Quantile `q` (0 to 1) over all rounds' samples together: a round alone has too few for a tail."""
    return _over_rounds(sorted(rounds), lambda drawn: float(np.quantile(_joined(rounds, drawn), q)))


def added_median(base: Rounds, arm: Rounds) -> Figure:
    """What `arm` adds to `base`: each round's medians are subtracted first, so that a slow minute hits both."""
    return median([float(np.median(arm[index]) - np.median(base[index])) for index in sorted(base.keys() & arm.keys())])


def added_quantile(base: Rounds, arm: Rounds, q: float) -> Figure:
    """What `arm` adds to `base`'s quantile `q` (0 to 1) over all rounds' samples together."""
    shared = sorted(base.keys() & arm.keys())
    return _over_rounds(
        shared,
        lambda drawn: float(np.quantile(_joined(arm, drawn), q) - np.quantile(_joined(base, drawn), q)),
    )


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept of the least-squares line through at least two different x. Raises ValueError."""
    x, y = np.array(points, float).T
    if np.ptp(x) == 0:
        raise ValueError("a line needs two different x")
    slope, intercept = np.polyfit(x, y, 1)
    return float(slope), float(intercept)


def _over_rounds(shared: Sequence[int], value: Callable[[Sequence[int]], float]) -> Figure:
    return _figure(value(shared), [value([shared[place] for place in drawn]) for drawn in _draws(len(shared))])


def _joined(rounds: Rounds, drawn: Sequence[int]) -> NDArray[np.float64]:
    return np.concatenate([rounds[index] for index in drawn])


def _draws(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(SEED).integers(count, size=(RESAMPLES, count))


def _figure(value: float, draws: Sequence[float] | NDArray[np.float64]) -> Figure:
    low, high = np.quantile(draws, LEVELS)
    return Figure(value, float(low), float(high))
