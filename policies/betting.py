"""Evidence that accumulates over generations and may be looked at after every one: e-processes, in log space.

One unit is one generation. Its tokens are not independent of each other (they share a prompt, a batch, kernels and,
under a calibrated null, one draw of the condition), so nothing here ever counts tokens.

Each function starts with a capital of 1 and bets against a null. As long as the null holds, the capital is a
nonnegative supermartingale, and by Ville's inequality (1939)

    P(capital ≥ 1/α at any time, ever) ≤ α

however often one looks and whenever one stops. Two kinds of null are bet against:

- `bernoulli`: a check whose single reject is exact, such as `selection`. The null grants an honest backend a stated
  rate of faults per generation, and is exact given that rate.
- `bounded`: a calibrated check. The null is that the mean of its bet is at most `mu0`, which a profile bounds from
  its calibration responses and may miss with probability δ (`Profile.delta`); evidence 1/α then accuses an honest
  backend with probability at most α + δ.

Sources: Shafer, "Testing by betting" (2021); Waudby-Smith and Ramdas, "Estimating means of bounded random variables
by betting" (2024); mixtures after Robbins (1970).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

LogEvidence = NDArray[np.float64]
"""float64 (…, n): natural logarithm of the capital after each of n units, along the last axis."""

RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9, 0.999)
"""Alternatives that `bernoulli` mixes: what share of a cheat's generations rejects. Only those above the null's rate
take part, with equal weights; 0.999 makes a cheat that is always caught cost few generations."""
FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
"""Shares of the capital that `bounded` puts at stake, from patient to bold."""
FRACTION_WEIGHTS = (1, 1, 1, 1, 1, 1, 1, 3)
"""Most weight on the boldest: a cheat whose every bet is 1 must cost few generations."""


def bernoulli(outcomes: ArrayLike, rate: float) -> LogEvidence:
    """Evidence against "each unit fails with probability at most `rate`, whatever came before".

    The capital is a mixture over p of Π (p/rate)^x · ((1 − p)/(1 − rate))^(1 − x) with every p > rate, so it also
    shrinks in expectation where the true rate lies below the granted one.

    Args:
        outcomes: (…, n), true or 1 where a unit failed.
        rate: in (0, 1).

    Raises:
        ValueError: `rate` is out of range.
    """
    if not 0 < rate < 1:
        raise ValueError(f"a rate of {rate} is no probability between 0 and 1")
    failed = np.asarray(outcomes, np.bool_)
    alternatives = np.array([p for p in RATES if p > 2 * rate] or [(1 + rate) / 2])
    gain, loss = np.log(alternatives / rate), np.log1p(-alternatives) - np.log1p(-rate)
    steps = np.where(failed[..., None], gain, loss)
    return _mixed(np.cumsum(steps, axis=-2), np.full(len(alternatives), 1 / len(alternatives)))


def bounded(bets: ArrayLike, mu0: ArrayLike) -> LogEvidence:
    """Evidence against "the mean of each bet, given everything before it, is at most its `mu0`".

    The capital is a mixture over fractions f of Π (1 + f·(bet/mu0 − 1)): each unit stakes the share f of what there
    is, at odds 1/mu0. That is λ = f/mu0 < 1/mu0 in the notation of Waudby-Smith and Ramdas, so it never turns
    negative; λ depends on nothing but mu0, which is known before the bet.

    Args:
        bets: (…, n) in [0, 1].
        mu0: above 0, for all units or one per unit (…, n): units of different length or temperature have different
            nulls. From 1 on a unit carries no evidence.

    Raises:
        ValueError: a bet or `mu0` is out of range.
    """
    values, means = np.broadcast_arrays(np.asarray(bets, np.float64), np.asarray(mu0, np.float64))
    if not bool(((values >= 0) & (values <= 1)).all()):
        raise ValueError("a bet lies outside [0, 1]")
    if not bool((means > 0).all()):
        raise ValueError("a mu0 is not above 0")
    weights = np.array(FRACTION_WEIGHTS) / sum(FRACTION_WEIGHTS)
    odds = np.where(means < 1, values / means - 1.0, 0.0)
    steps = np.log1p(odds[..., None] * np.array(FRACTIONS))
    return _mixed(np.cumsum(steps, axis=-2), weights)


def average(running: Sequence[LogEvidence], weights: Sequence[float]) -> LogEvidence:
    """Evidence of several processes over the same units, as their average with fixed weights.

    A weighted average of supermartingales is one, however they depend on each other, so one check's evidence counts
    for the whole with the loss of its weight alone. A process whose check says nothing of a unit keeps its value.

    Args:
        running: each (…, n), of one shape.
        weights: one per process, fixed beforehand, 0 or more, at most 1 in all.

    Raises:
        ValueError: weights or shapes do not fit.
    """
    if len(running) != len(weights) or not running:
        raise ValueError(f"{len(running)} processes and {len(weights)} weights")
    if min(weights) < 0 or not sum(weights) <= 1 + 1e-12:
        raise ValueError("weights must be 0 or more, and at most 1 in all")
    if len({np.shape(process) for process in running}) != 1:
        raise ValueError("the processes are of different lengths")
    return _mixed(np.stack(running, axis=-1), np.asarray(weights, np.float64))


def first_over(log_e: LogEvidence, level: float) -> int | None:
    """The unit, counted from 1, after which the evidence first reaches 1/`level`; None when it never does."""
    over = np.flatnonzero(np.asarray(log_e) >= -np.log(level))
    return int(over[0]) + 1 if len(over) else None


def _mixed(logs: NDArray[np.float64], weights: NDArray[np.float64]) -> LogEvidence:
    """log Σ w·exp(logs) over the last axis."""
    kept = weights > 0
    if not kept.any():
        return np.full(logs.shape[:-1], -np.inf)
    terms = logs[..., kept] + np.log(weights[kept])
    largest = terms.max(axis=-1, keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0.0)
    with np.errstate(divide="ignore"):
        mixed: LogEvidence = np.log(np.exp(terms - largest).sum(axis=-1)) + largest[..., 0]
    return mixed
