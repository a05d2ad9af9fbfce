"""Evidence that accumulates over generations and may be looked at after every one: e-processes, in log space.

One unit is one generation. Its tokens are not independent of each other (they share a prompt, a batch, kernels and,
under a calibrated null, one draw of the condition), so nothing here ever counts tokens.

Each function starts with a capital of 1 and bets against a null. As long as the null holds, the capital is a
nonnegative supermartingale, and by Ville's inequality (1939)

    P(capital ≥ 1/α at any time, ever) ≤ α

however often one looks and whenever one stops. Two kinds of null are bet against:

- `bernoulli`: a check whose single reject is exact, such as `selection`. The null grants an honest backend a stated
  rate of faults per generation, and is exact given that rate.
- `calibrated`: a calibrated check. The null is that an honest backend's responses are more draws from the conditions
  that the profile was measured under: each condition's calibration responses and its new ones are exchangeable. Then
  how often new ones lie beyond all of n old ones has a known law. α covers the luck of the calibration too.
- `bounded`: the same from one number per response. The null is that the mean of its bet is at most `mu0`, which a
  profile bounds from its calibration responses and may miss with probability δ (`Profile.delta`); evidence 1/α then
  accuses an honest backend with probability at most α + δ. Slower than `calibrated` by a factor of about three.

Sources: Shafer, "Testing by betting" (2021); Waudby-Smith and Ramdas, "Estimating means of bounded random variables
by betting" (2024); mixtures after Robbins (1970); tolerance limits after Wilks (1941).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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

POINTS_PER_OCTAVE = 4
"""Fineness of what `calibrated` averages over."""
LARGEST_REACH = 32
"""`calibrated` considers chances of up to 1 − e⁻³²."""


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


def calibrated(exceeds: ArrayLike, n: ArrayLike, groups: int = 1) -> LogEvidence:
    """Evidence against "these responses come from the conditions that were calibrated".

    The chance θ that one more response of a condition exceeds all n calibrated ones is itself random, through the
    luck of the calibration: (1 − θ)ⁿ is uniform on (0, 1), or larger where scores tie or other conditions raise the
    bar. With several groups of responses (temperature and length bands), each with its own n and its bars measured on
    partly the same calibration responses, the smallest of those uniforms is at least Q/groups for some uniform Q,
    however they depend on each other. So an honest backend exceeds no more often than with 1 − (Q/groups)^(1/n) each
    time, for one Q. The capital is the likelihood of what was seen, averaged over Q with weights that grow towards
    small Q, over its average under uniform Q. Since those weights only grow, every exceedance adds evidence and none
    less takes some, whence validity for whoever exceeds more rarely than the bound allows, and under any mixture of
    conditions.

    Args:
        exceeds: (…, n units), true or 1 where a response lies beyond every calibrated one of every matching cell.
        n: calibration responses of the smallest matching cell, for all units or one per unit.
        groups: in how many groups responses can fall.

    Raises:
        ValueError: an n or `groups` is below 1.
    """
    beyond, counts = np.broadcast_arrays(np.asarray(exceeds, np.bool_), np.asarray(n, np.float64))
    if groups < 1 or not bool((counts >= 1).all()):
        raise ValueError("there must be at least one group, and one calibration response in each")
    levels, null, bold = _levels(float(counts.max(initial=1.0)))
    stays = -(levels + np.log(groups)) / counts[..., None]
    with np.errstate(divide="ignore"):
        steps = np.where(beyond[..., None], np.log(-np.expm1(stays)), stays)
    sums = np.cumsum(steps, axis=-2)
    return _log_sum(sums + bold) - _log_sum(sums + null)


def _levels(most: float) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Points of log(1/Q), and the log weights of null and alternative on them.

    A point carries the null's weight from the point before it, so that what is averaged exceeds no more rarely than
    uniform Q; the last is Q = 0. The alternative is level over log log(1/Q), from Q = e⁻² on.
    """
    finite = 0.25 * 2 ** np.arange(
        0, np.log2(LARGEST_REACH * most / 0.25) + POINTS_PER_OCTAVE**-1, 1 / POINTS_PER_OCTAVE
    )
    levels = np.concatenate([finite, [np.inf]])
    before = np.concatenate([[0.0], finite])
    null = -before + np.log(-np.expm1(before - levels))
    bold = np.where(levels >= 2, 0.0, -np.inf)
    # Null and alternative weigh the last point alike, relative to the one before.
    bold[-1] = bold[-2] + null[-1] - null[-2]
    return levels, null, bold - _log_sum(bold)


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


def of_check(metrics: Sequence[Mapping[str, float | int | None]]) -> LogEvidence:
    """Evidence of one calibrated check over successive responses, from its `Check.metrics` (see `calibrated`).

    A response that the check could not judge leaves the evidence as it was. All must be judged by one profile.
    """
    units = [found for found in metrics if found.get("exceeds") is not None]
    exceeds = [bool(found["exceeds"]) for found in units]
    counts = [int(found.get("n_least") or 1) for found in units]
    groups = max((int(found.get("groups") or 1) for found in units), default=1)
    running = np.concatenate([[0.0], calibrated(exceeds, counts, groups)])
    return running[np.cumsum([found.get("exceeds") is not None for found in metrics], dtype=np.intp)]


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
    with np.errstate(divide="ignore"):
        return _log_sum(logs + np.log(weights))


def _log_sum(terms: NDArray[np.float64]) -> LogEvidence:
    """log Σ exp over the last axis."""
    largest = terms.max(axis=-1, keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0.0)
    with np.errstate(divide="ignore"):
        total: LogEvidence = np.log(np.exp(terms - largest).sum(axis=-1)) + largest[..., 0]
    return total
