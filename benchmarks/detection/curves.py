"""Power against tokens, ROC curves and e-value paths of judged answers. Pure: rows in, arrays out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.adversary.score import log_evidence, wilson
from benchmarks.detection.judging import Row, as_choice

LENGTH = 128
"""Tokens of the answers whose single scores are compared."""
LEVEL = 1e-6
ORDERS = 60
SEED = 11
POWERS = (0.5, 0.9, 0.99)
FALSE_ALARMS = (0.001, 0.01, 0.05)

Array = NDArray[np.float64]
Statistic = Callable[[Row], float | None]


def _column(name: str) -> Statistic:
    return lambda row: None if row.get(name) in (None, "") else float(row[name])


def _violations(row: Row) -> float | None:
    checked = row.get("selection checked")
    return float(row["selection violations"]) / float(checked) if checked and row["tokens"] >= LENGTH else None


def _margin(row: Row) -> float | None:
    return _column("margin score")(row) if row["tokens"] >= LENGTH else None


STATISTICS: dict[str, Statistic] = {
    "distance": _column(f"distance @{LENGTH}"),
    "margin": _margin,
    "selection": _violations,
}
"""What one answer of 128 tokens scores, larger for the worse: by our three checks that have a score."""


@dataclass(frozen=True, slots=True)
class Roc:
    """How a statistic tells one arm's answers from honest ones.

    Attributes:
        alarms: float64 (n,), share of honest answers beyond each threshold, ascending.
        caught: float64 (n,), share of the arm's beyond the same.
        honest, cheats: how many there were.
    """

    alarms: Array
    caught: Array
    honest: int
    cheats: int

    @property
    def area(self) -> float:
        """Under the curve: the chance that a cheat's answer scores higher than an honest one, ties counting half."""
        return float(np.trapezoid(self.caught, self.alarms))

    def corners(self) -> list[tuple[float, float]]:
        """Points at which more is caught than before."""
        points = zip(self.alarms.tolist(), self.caught.tolist(), strict=True)
        highest, found = -1.0, list[tuple[float, float]]()
        for alarm, caught in points:
            if caught > highest:
                highest = caught
                found.append((alarm, caught))
        return found

    def at(self, alarms: float) -> float:
        """Share caught with at most so many false alarms."""
        return float(self.caught[self.alarms <= alarms].max(initial=0.0))

    def interval(self, alarms: float) -> tuple[float, float]:
        """Of that share, 95 % by Wilson; what the threshold owes to luck is not in it."""
        return wilson(round(self.at(alarms) * self.cheats), self.cheats)


def honest(rows: Sequence[Row]) -> list[Row]:
    """Honest answers of one declaration: of the dense model, decoded as declared."""
    return [row for row in rows if row["kind"] == "honest" and not row["arm"].startswith(("moe", "speculative"))]


def roc(rows: Sequence[Row], cheats: Sequence[Row], statistic: str) -> Roc | None:
    """Of honest `rows` against `cheats`; None where either has no such score."""
    null, other = _scores(rows, statistic), _scores(cheats, statistic)
    if not len(null) or not len(other):
        return None
    thresholds = np.unique(np.concatenate([null, other]))[::-1]
    alarms = np.concatenate([[0.0], _above(null, thresholds), [1.0]])
    caught = np.concatenate([[0.0], _above(other, thresholds), [1.0]])
    return Roc(alarms, caught, len(null), len(other))


def _scores(rows: Sequence[Row], statistic: str) -> Array:
    found = [value for row in rows if (value := STATISTICS[statistic](row)) is not None and math.isfinite(value)]
    return np.array(found, np.float64)


def _above(scores: Array, thresholds: Array) -> Array:
    ordered = np.sort(scores)
    return 1.0 - np.searchsorted(ordered, thresholds, side="left") / len(ordered)


@dataclass(frozen=True, slots=True)
class Paths:
    """Evidence over the answers of one arm, in random orders.

    Attributes:
        tokens: float64 (orders, n), output tokens so far.
        evidence: float64 (orders, n), log₁₀ of the e-value after each answer.
    """

    tokens: Array
    evidence: Array

    def crossing(self, level: float = LEVEL) -> Array:
        """float64 (orders,): tokens until the evidence first reached 1/`level`; inf where it never did."""
        over = self.evidence >= -math.log10(level) - 1e-9
        first = over.argmax(axis=1)
        found = self.tokens[np.arange(len(first)), first]
        return np.where(over.any(axis=1), found, np.inf)

    def power(self, tokens: Array, level: float = LEVEL) -> Array:
        """Share of orders whose evidence has reached 1/`level` within so many tokens."""
        crossed = np.sort(self.crossing(level))
        return np.searchsorted(crossed, tokens, side="right") / len(crossed)

    def needed(self, power: float, level: float = LEVEL) -> float | None:
        """Tokens within which that share of orders gets there; None where it does not."""
        crossed = np.sort(self.crossing(level))
        found = float(crossed[math.ceil(power * len(crossed)) - 1])
        return found if math.isfinite(found) else None


def paths(rows: Sequence[Row], orders: int = ORDERS, longest: int = 400) -> Paths:
    """Evidence of an arm's answers, at most `longest` of them in each random order."""
    return paths_of([as_choice(row) for row in rows], [float(row["tokens"]) for row in rows], orders, longest)


def paths_of(choices: Sequence[dict[str, object]], tokens: Sequence[float], orders: int, longest: int) -> Paths:
    """The same of verifications' choices."""
    random = np.random.default_rng(SEED)
    counts = np.array(tokens, np.float64)
    taken = np.array([random.permutation(len(choices)) for _ in range(orders)])
    evidence = log_evidence(choices, taken.tolist()) / math.log(10)
    return Paths(np.cumsum(counts[taken], axis=1)[:, :longest], evidence[:, :longest])
