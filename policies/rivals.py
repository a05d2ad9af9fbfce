"""Other systems' statistics on the same evidence, to compare with ours. No check of Countersign decides by them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.evidence import MASKED, TOP_LOGPROBS, Evidence, Replay

GONKA_LENGTH_FLOOR = 100
"""Answers shorter than this are divided by it all the same, so that short ones always look close."""
GONKA_THRESHOLDS = (0.98, 0.99)
"""Similarity 1 − d an answer must exceed; gonka keeps one per model, within this range."""
LOGIC_POSITIONS = 10
_SOFT = 1e-6

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Kolmogorov:
    """Two-sample Kolmogorov–Smirnov: the largest distance of the empirical distributions, in [0, 1], and its p-value.

    The p-value assumes independent samples. These are the same tokens twice, so it is far too large: LOGIC's test
    has next to no power.
    """

    distance: float
    p: float


def gonka_distance(evidence: Evidence, replay: Replay, *, k: int = TOP_LOGPROBS) -> float:
    """Gonka's distance d of one generation, in [0, 0.5]; it passes an answer when 1 − d exceeds its threshold.

    d = Σ over positions and the claim's top k of |ℓ − r| ÷ (2(10⁻⁶ + |ℓ| + |r|)), divided by max(100, N)·k. A
    claimed token the reference does not list gets r = min₁ − (min₂ − min₁) of the reference's two smallest. Relative
    differences make tokens with a logprob near 0 dominate. No null hypothesis, no error rate. NaN, not 0, where a
    served token lacks a claim or a replay: gonka once passed such answers.
    """
    count = len(evidence.output_ids)
    if not count or len(evidence.claim_ids) < count or len(replay.ids) < count:
        return math.nan
    ids, claim = _top(evidence.claim_ids[:count], evidence.claim_logprobs[:count], k)
    own = slice(0, replay.own if replay.form == "full" else None)
    other_ids, reference = replay.ids[:count, own], _clean(replay.ids[:count, own], replay.logprobs[:count, own])
    ordered = np.sort(np.where(np.isfinite(reference), reference, np.inf), axis=1)
    if not np.isfinite(ordered[:, 0]).all() or not np.isfinite(claim).any(axis=1).all():
        return math.nan
    lowest = ordered[:, 0]
    second = np.where(np.isfinite(ordered[:, 1]), ordered[:, 1], lowest) if ordered.shape[1] > 1 else lowest
    missing = lowest - (second - lowest)
    same = (ids[:, :, None] == other_ids[:, None, :]) & np.isfinite(reference)[:, None, :]
    found = np.take_along_axis(reference, same.argmax(axis=2), axis=1)
    theirs = np.where(same.any(axis=2), found, missing[:, None])
    listed = np.isfinite(claim)
    ours = np.where(listed, claim, 0.0)
    terms = np.abs(ours - theirs) / (2 * (_SOFT + np.abs(ours) + np.abs(theirs)))
    return float(np.where(listed, terms, 0.0).sum() / (max(GONKA_LENGTH_FLOOR, count) * k))


def logic_test(evidence: Evidence, replay: Replay, *, positions: int = LOGIC_POSITIONS, seed: int = 0) -> Kolmogorov:
    """LOGIC's test: all listed logprobs at a few random positions, claim against replay. NaN without any."""
    count = min(len(evidence.output_ids), len(evidence.claim_ids), len(replay.ids))
    chosen = np.random.default_rng(seed).permutation(count)[:positions]
    claim = _clean(evidence.claim_ids[chosen], evidence.claim_logprobs[chosen])
    own = slice(0, replay.own if replay.form == "full" else None)
    reference = _clean(replay.ids[chosen][:, own], replay.logprobs[chosen][:, own])
    return kolmogorov_smirnov(claim[np.isfinite(claim)], reference[np.isfinite(reference)])


def kolmogorov_smirnov(first: _Floats, second: _Floats) -> Kolmogorov:
    """The two-sample test with the asymptotic law (Stephens' correction for finite samples)."""
    if not len(first) or not len(second):
        return Kolmogorov(math.nan, math.nan)
    everything = np.concatenate([first, second])
    below = np.searchsorted(np.sort(first), everything, side="right") / len(first)
    other = np.searchsorted(np.sort(second), everything, side="right") / len(second)
    distance = float(np.abs(below - other).max())
    size = math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    scaled = (size + 0.12 + 0.11 / size) * distance
    if scaled < 0.2:
        # The series converges slowly here, and the law is 1 to twelve digits.
        return Kolmogorov(distance, 1.0)
    terms = [(-1) ** (j - 1) * math.exp(-2 * (j * scaled) ** 2) for j in range(1, 101)]
    return Kolmogorov(distance, min(1.0, max(0.0, 2 * math.fsum(terms))))


def _top(ids: NDArray[np.int32], logprobs: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], _Floats]:
    """The k largest claimed, without the emitted token where it is not among them."""
    values = _clean(ids, logprobs)
    order = np.argsort(-values, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1)


def _clean(ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> _Floats:
    """−inf wherever an entry is a pad, masked or not finite."""
    values = logprobs.astype(np.float64)
    return np.where((ids >= 0) & np.isfinite(values) & (values > MASKED), values, -np.inf)
