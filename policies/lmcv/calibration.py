"""LMCV's two ways to get thresholds from measured samples, as policies.

Both read per-sample metrics; neither holds data back, so the rates they promise are those of the calibration set
(optimistic: runs over the same answers are not independent). Recalibrate at another K, engine, kernel or prompt mix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from policies.lmcv.divergence import Floats
from policies.lmcv.rules import JACCARD, JS99, MEAN, P95, P99, RANK, Bound, Policy, bounds
from policies.lmcv.summary import quantiles

COMPARED = "missing_compared_count"
UPPER = (MEAN, P95, P99, RANK, JS99)

Samples = Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Separation:
    """One metric of `base_vs_challenger`: bounds, and how far the two sets lie apart.

    Attributes:
        gap: challenger median − base 99 % quantile (for Jaccard base 1 % quantile − challenger median).
        detected, false_rejects: shares of challenger and base samples beyond the reject bound.
    """

    metric: str
    accept: float
    reject: float
    gap: float
    detected: float
    false_rejects: float


def self_calibration(
    base: Samples,
    *,
    k: int,
    name: str = "self-calibrated",
    quantile: float = 0.99,
    multiplier: float = 1.25,
    reject_multiplier: float = 3.0,
    jaccard_margin: float = 0.02,
) -> Policy:
    """A policy from honest samples alone: the quantile times 1.25 passes, three times that rejects.

    Jaccard mirrors it: the low quantile less a margin, and a third of that. Missing rows: the most seen, and one more.

    Raises:
        ValueError: no sample has a finite value of some metric.
    """
    accept = {metric: _quantile(base, metric, quantile) * multiplier for metric in UPPER}
    reject = {metric: value * reject_multiplier for metric, value in accept.items()}
    accept[JACCARD] = max(0.0, _quantile(base, JACCARD, 1 - quantile) - jaccard_margin)
    reject[JACCARD] = accept[JACCARD] / reject_multiplier
    return _policy(name, k, base, accept, reject)


def base_vs_challenger(
    base: Samples,
    challenger: Samples,
    *,
    k: int,
    name: str = "base-vs-challenger",
    pass_rate: float = 0.99,
    false_rejects: float = 0.01,
    multiplier: float = 1.10,
    lower_margin: float = 0.02,
) -> tuple[Policy, tuple[Separation, ...]]:
    """A policy that tells honest samples from another model's.

    Pass: the base quantile times 1.10 (Jaccard: less a margin). Reject: the midpoint between pooled values with the
    largest Youden index (share of challenger beyond − share of base beyond) among those that reject at most 1 % of the
    base; never inside the pass bound.

    Raises:
        ValueError: a set has no finite value of some metric.
    """
    accept, reject, found = {}, {}, []
    for metric in (*UPPER, JACCARD):
        sign = -1.0 if metric == JACCARD else 1.0
        honest, other = sign * _values(base, metric), sign * _values(challenger, metric)
        edge = quantiles(honest, (pass_rate,))[0]
        bound = edge * multiplier if sign > 0 else min(0.0, edge + lower_margin)
        limit = max(_youden(honest, other, false_rejects), bound)
        accept[metric], reject[metric] = sign * bound + 0.0, sign * limit + 0.0
        high, middle = quantiles(honest, (0.99,))[0], quantiles(other, (0.5,))[0]
        shares = float((other > limit).mean()), float((honest > limit).mean())
        found.append(Separation(metric, accept[metric], reject[metric], middle - high, *shares))
    return _policy(name, k, base, accept, reject), tuple(found)


def _youden(honest: Floats, other: Floats, false_rejects: float) -> float:
    """Larger is more suspicious. Of equals, the one that rejects fewest honest samples; then the lowest."""
    pooled = np.unique(np.concatenate([honest, other]))
    middles = (pooled[1:] + pooled[:-1]) / 2
    wrong = 1 - np.searchsorted(np.sort(honest), middles, side="right") / len(honest)
    right = 1 - np.searchsorted(np.sort(other), middles, side="right") / len(other)
    allowed = wrong <= false_rejects
    if not allowed.any():
        return quantiles(honest, (1 - false_rejects,))[0]
    middles, wrong, right = middles[allowed], wrong[allowed], right[allowed]
    return float(middles[np.lexsort((middles, wrong, -(right - wrong)))[0]])


def _policy(name: str, k: int, base: Samples, accept: Mapping[str, float], reject: Mapping[str, float]) -> Policy:
    most = float(_values(base, COMPARED).max())
    return Policy(
        name=name,
        version="1",
        k=k,
        accept=(Bound(COMPARED, "<=", most), *bounds(accept)[1:]),
        reject=(Bound(COMPARED, ">", most + 1), *bounds(reject, reject=True)[1:]),
    )


def _quantile(samples: Samples, metric: str, level: float) -> float:
    return quantiles(_values(samples, metric), (level,))[0]


def _values(samples: Samples, metric: str) -> Floats:
    values = np.array([sample.get(metric, np.nan) for sample in samples], np.float64)
    finite: Floats = values[np.isfinite(values)]
    if not len(finite):
        raise ValueError(f"no sample has a finite {metric}")
    return finite
