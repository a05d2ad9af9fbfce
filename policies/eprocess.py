"""Evidence over a backend's life that never forgets how to react: e-processes with every possible moment of change.

Null hypothesis, per process: given everything before it, the mean of each unit's outcome x in [0, 1] is at most its
`mu0`. For the exact processes mu0 is the stated fault rate, for the calibrated ones the profile's bound, which fails
with probability δ for all its cells together, for `forged` the measured rate (`policies.margin`). Nothing is assumed of
how units depend on each other: the null may sit on its boundary at some times and anywhere below it at others.

*Steps.* Each component of a process stakes a fixed share f of what it has at odds 1/mu0: it multiplies its capital by
e = 1 + f·(x/mu0 − 1), whose mean is at most 1 under the null. For x in {0, 1} that is a likelihood ratio of the rate
p = mu0 + f·(1 − mu0) against mu0 (Waudby-Smith and Ramdas 2024; Shafer 2021). Components mix patient and bold stakes
with fixed weights; processes are averaged with fixed weights, never multiplied, because they share a replay.

*Change.* A capital that an honest past has worn down is a licence to cheat for a while. So each component is a sum over
all moments j of a capital that starts there with ω_j:

    M_n = e_n · (M_{n−1} + ω_n),    M_0 = 0,    Σ ω_n ≤ 1.

M_n + (1 − ω_1 − … − ω_n) is a nonnegative supermartingale that starts at 1, so P(M_n ≥ 1/α for any n) ≤ α (Ville 1939)
over the whole life, however often one looks. A change at unit j costs ln(1/ω_j), not the losses of the past.

*Suspicion.* R_n = e_n · (R_{n−1} + 1) (Shiryaev–Roberts) reacts without that price, but crosses any level in time
(E R_n = n under the null). It bounds nothing over a life and may only raise the audit rate and a warning.

All arrays have a leading shape (…) of backends, so that a simulation and a single record run the same code; logarithms
are natural.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from policies.margin import FORGED_RATE
from policies.unit import EXACT, PROCESSES, REPLAYED

Floats = NDArray[np.float64]

STAKES = {
    **dict.fromkeys(EXACT, (0.002, 0.009, 0.03, 0.1, 0.3, 0.6, 0.9, 0.999)),
    **dict.fromkeys(REPLAYED, (0.01, 0.03, 0.08, 0.2, 0.4, 0.6, 0.8, 0.95)),
}
"""Shares f of the capital, by process, from patient to bold."""
STAKE_WEIGHTS = (1, 1, 1, 1, 1, 1, 1, 3)
"""Most on the boldest: a cheat that is always caught must cost few answers."""
COMPONENTS = len(STAKE_WEIGHTS)
HORIZON = 1000
"""Units after which suspicion is no longer measured against the number of all."""
MOST_SUSPICION = 16.0
"""Where each component of R ends: a process that fails all the time still reaches a suspicion of 1,000, and then some
hundred clean units bring it down again."""
NOTHING = -math.inf
"""The logarithm of no capital: where M and R begin."""

_FIRST = 0.5
_SERIES = 2.1098
"""Upper bound on Σ 1/(n ln² n) over n ≥ 2, which is 2.10974…"""


def weight(n: int) -> float:
    """ω_n, the share of the budget that a change at unit n (from 1) has: ½ at first, then 0.237/(n·ln² n)."""
    if n < 1:
        raise ValueError(f"there is no unit {n}")
    return _FIRST if n == 1 else (1 - _FIRST) / (_SERIES * n * math.log(n) ** 2)


def null_means(outcomes: Mapping[str, tuple[float, float]], fault_rate: float) -> tuple[Floats, Floats]:
    """x and mu0 (7,) of a unit's outcomes, in the order of `PROCESSES`; x is NaN where a process has none."""
    x, mu0 = np.full(len(PROCESSES), np.nan), np.ones(len(PROCESSES))
    for at, name in enumerate(PROCESSES):
        if name in outcomes:
            x[at], given = outcomes[name]
            mu0[at] = fault_rate if name in EXACT else FORGED_RATE if name == "forged" else given
    return x, mu0


def steps(x: ArrayLike, mu0: ArrayLike) -> Floats:
    """Logarithms of e, (…, 7, 8): per process and stake.

    Args:
        x: (…, 7) outcomes in [0, 1]; NaN says nothing and leaves the capital as it is.
        mu0: (…, 7), above 0; from 1 on an outcome says nothing either.

    Raises:
        ValueError: an outcome or a mean is out of range.
    """
    values, means = np.broadcast_arrays(np.asarray(x, np.float64), np.asarray(mu0, np.float64))
    heard = ~np.isnan(values) & (means < 1)
    if not bool(((values[heard] >= 0) & (values[heard] <= 1)).all()) or not bool((means > 0).all()):
        raise ValueError("an outcome lies outside [0, 1], or its mean is not above 0")
    odds = np.where(heard, np.where(heard, values, 0.0) / means - 1.0, 0.0)
    return np.log1p(odds[..., None] * _stakes())


def advance(log_m: Floats, log_e: Floats, n: int) -> Floats:
    """M after unit n (from 1), in logarithms, (…, 7, 8)."""
    after: Floats = log_e + np.logaddexp(log_m, math.log(weight(n)))
    return after


def worry(log_r: Floats, log_e: Floats) -> Floats:
    """R after one more unit, in logarithms, (…, 7, 8); never over `MOST_SUSPICION`, so that it passes in time."""
    after: Floats = np.minimum(log_e + np.logaddexp(log_r, 0.0), MOST_SUSPICION)
    return after


def log_evidence(log_m: Floats, processes: Sequence[str] = PROCESSES) -> Floats:
    """log of the weighted average of M (…, 7, 8) over some processes (…); the weights stay those of all seven."""
    chosen = [PROCESSES.index(name) for name in processes]
    terms = log_m[..., chosen, :] + _log_weights()
    return _log_sum(terms.reshape(*terms.shape[:-2], -1))


def log_suspicion(log_r: Floats, n: int) -> Floats:
    """log(R_n / min(n, HORIZON)), R averaged as the evidence is; minus infinity before unit 1.

    Under the null the mean of R_n/n is at most 1. Beyond the horizon the yardstick stays, so that a change after a
    hundred thousand units is not noticed later than one after a thousand.
    """
    return log_evidence(log_r) - math.log(min(n, HORIZON)) if n else np.full(log_r.shape[:-2], NOTHING)


def start(shape: tuple[int, ...] = ()) -> Floats:
    """M or R before the first unit, (…, 7, 8)."""
    return np.full((*shape, len(PROCESSES), COMPONENTS), NOTHING)


@cache
def _stakes() -> Floats:
    return np.array([STAKES[name] for name in PROCESSES])


@cache
def _log_weights() -> Floats:
    return np.log(np.array(STAKE_WEIGHTS) / sum(STAKE_WEIGHTS) / len(PROCESSES))


def _log_sum(terms: Floats) -> Floats:
    """log Σ exp over the last axis; minus infinity of nothing."""
    largest = np.maximum(terms.max(axis=-1, keepdims=True), -1e308)
    total: Floats = np.log(np.maximum(np.exp(terms - largest).sum(axis=-1), 1e-300)) + largest[..., 0]
    return np.where(terms.max(axis=-1) == NOTHING, NOTHING, total)
