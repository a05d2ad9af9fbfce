"""Which claimed candidates top-k, top-p and min-p leave in play, as far as a claim can tell.

vLLM divides logits by T, then cuts by min-p, by top-k, and last by top-p over the renormalised rest. A claim
shows the top of the distribution exactly; of everything else it shows the total mass M = 1 − Σ p and that no
token there beats the least of the listed alternatives, p_min. At temperature T the unlisted weight Σ p^(1/T)
then lies between M·p_min^(1/T − 1) and V^(1 − 1/T)·M^(1/T), the mass in as few or as many tokens as it can be.
Candidates whose fate that leaves open are neither kept nor dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.evidence import Sampling

MOST_TOKENS = 2**18
"""Stands in for an undeclared vocabulary's size in the bound above; larger than any vLLM serves today."""
EDGE = 1e-3
"""Half-width of the undecided edge: of top-p in probability, of min-p in log weight. vLLM's own cuts are made
from fp32 sums over the vocabulary and, on a GPU, by a pivot search; without an edge 2 of 3,778 honest tokens
fell on the wrong side of a nucleus of 0.9 (H200)."""
MASS_ROUNDING = 1e-5
"""How far a sum of claimed probabilities may be off, from fp32 logprobs."""
TIE = 1e-6
"""Scaled logprobs this close count as tied; which of them a cut takes is arbitrary."""

_Floats = NDArray[np.float64]
_Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Survivors:
    """Fate of each candidate, bool (G, W): certainly in play, certainly cut. Neither: undecided."""

    kept: _Flags
    dropped: _Flags


def survivors(
    logprobs: _Floats, candidates: _Flags, complete: _Flags, temperature: float, sampling: Sampling, vocab_size: int
) -> Survivors:
    """Applies the request's truncation to a claim.

    Args:
        logprobs: float64 (G, W), sampled token first.
        candidates: bool (G, W), entries that are real tokens with a finite, unmasked logprob.
        complete: bool (G,), rows known to list every token that can be drawn (a grammar masked the others).
        temperature: above 0.
        vocab_size: bound on the number of tokens.
    """
    if not (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0):
        return Survivors(candidates, ~candidates)
    scaled = np.where(candidates, logprobs / temperature, -np.inf)
    scaled -= _row_max(scaled)
    weights = np.exp(scaled)
    # An unlisted token may outrank the sampled one only where that lies below every listed alternative.
    others_least = np.where(candidates, logprobs, np.inf)[:, 1:].min(axis=1, initial=np.inf)
    sampled_below = ~complete & (logprobs[:, 0] < others_least)

    rank = _ranked(scaled, weights)

    kept = candidates.copy()
    dropped = ~candidates
    if sampling.min_p > 0:
        edge = np.log(sampling.min_p)
        kept &= scaled >= edge + EDGE
        dropped |= scaled < edge - EDGE
    few = _fewer_than_k(kept, complete, sampling)
    if sampling.top_k > 0:
        within = rank.most < sampling.top_k
        within[:, 0] &= ~sampled_below
        kept &= within
        dropped |= rank.least >= sampling.top_k
    first = candidates & (rank.most == 0)
    if sampling.top_p < 1:
        # Cuts are thresholds: where a listed alternative falls, every unlisted token falls. Counting k tokens would
        # not do, because a tie at the k-th keeps more than k.
        gone = complete | (dropped & candidates)[:, 1:].any(axis=1)
        cut = sampling.min_p > 0 or sampling.top_k > 0
        tail_low, tail_high = _tail(logprobs, candidates, gone, temperature, vocab_size, cut)
        total_low = (weights * kept).sum(axis=1, keepdims=True) + tail_low
        total_high = (weights * ~dropped).sum(axis=1, keepdims=True) + tail_high
        most = rank.most_weight
        most[:, 0] += np.where(sampled_below, tail_high[:, 0], 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            kept &= most < (sampling.top_p - EDGE) * total_low
            dropped |= rank.least_weight >= (sampling.top_p + EDGE) * total_high
    kept &= ~few[:, None]
    # The single largest candidate survives every cut.
    return Survivors((kept | first) & candidates, dropped & ~first)


def _fewer_than_k(kept: _Flags, complete: _Flags, sampling: Sampling) -> _Flags:
    """Rows in which fewer than k tokens may be left for top-k, with a top-p cut after it; bool (G,).

    There vLLM 0.32's GPU kernel can cut tokens that top-p should keep: with k = 5, p = 0.6 and min-p = 0.1, on an
    H200, 4 of 82 tokens lost to nobody but the largest (two candidates left, of weights 1 and 0.86).
    """
    if not (sampling.top_k > 0 and sampling.top_p < 1):
        return np.zeros(len(kept), np.bool_)
    few: _Flags = (kept.sum(axis=1) < sampling.top_k) & (complete | (sampling.min_p > 0))
    return few


@dataclass(frozen=True, slots=True)
class _Ranked:
    """How many candidates, of what weight, stand before each one, with ties counted not at all or in full."""

    least: NDArray[np.int64]
    most: NDArray[np.int64]
    least_weight: _Floats
    most_weight: _Floats


def _ranked(scaled: _Floats, weights: _Floats) -> _Ranked:
    width = scaled.shape[1]
    order = np.argsort(-scaled, axis=1)
    values = np.take_along_axis(scaled, order, axis=1)
    sorted_weights = np.take_along_axis(weights, order, axis=1)
    columns = np.broadcast_to(np.arange(width), scaled.shape)
    # A run of ties begins where a value lies clearly below the one before it.
    begins = np.ones(scaled.shape, bool)
    begins[:, 1:] = values[:, 1:] < values[:, :-1] - TIE
    start = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    ends = np.ones(scaled.shape, bool)
    ends[:, :-1] = begins[:, 1:]
    end = np.minimum.accumulate(np.where(ends, columns, width - 1)[:, ::-1], axis=1)[:, ::-1]
    through = np.cumsum(sorted_weights, axis=1)
    before = through - sorted_weights
    back = np.argsort(order, axis=1)

    def unsort(sorted_values: NDArray[Any]) -> NDArray[Any]:
        return np.take_along_axis(sorted_values, back, axis=1)

    return _Ranked(
        least=unsort(start),
        most=unsort(end),
        least_weight=unsort(np.take_along_axis(before, start, axis=1)),
        most_weight=unsort(np.take_along_axis(through, end, axis=1) - sorted_weights),
    )


def _tail(
    logprobs: _Floats, candidates: _Flags, gone: _Flags, temperature: float, vocab_size: int, cut: bool
) -> tuple[_Floats, _Floats]:
    """Bounds on the unlisted weight in play, relative to the largest candidate's; (G, 1) each.

    `gone` marks rows whose unlisted tokens are certainly out; `cut` says that some may be out in any row.
    """
    masked = np.where(candidates, logprobs, -np.inf)
    largest = _row_max(masked)
    least = np.where(candidates, logprobs, np.inf)[:, 1:].min(axis=1, initial=np.inf)[:, None]
    least = np.where(np.isfinite(least), least, largest)
    unlisted = 1.0 - np.exp(np.minimum(masked, 0.0)).sum(axis=1, keepdims=True)
    inverse = 1.0 / temperature

    def bounds(mass: _Floats) -> tuple[_Floats, _Floats]:
        with np.errstate(divide="ignore"):
            few = np.log(mass) + (inverse - 1.0) * least
            many = (1.0 - inverse) * np.log(vocab_size) + inverse * np.log(mass)
        return np.minimum(few, many), np.maximum(few, many)

    low = _exp(bounds(np.maximum(unlisted - MASS_ROUNDING, 0.0))[0] - inverse * largest)
    high_mass = np.maximum(unlisted, 0.0) + MASS_ROUNDING
    high = _exp(bounds(high_mass)[1] - inverse * largest)
    high = np.minimum(high, vocab_size * _exp(inverse * (least - largest)))
    high = np.where(gone[:, None], 0.0, high)
    if cut:
        low = np.zeros_like(low)
    return np.minimum(low, high), high


def _exp(values: _Floats) -> _Floats:
    # Impossible claims must not overflow.
    result: _Floats = np.exp(np.minimum(values, 600.0))
    return result


def _row_max(values: _Floats) -> _Floats:
    """Largest of each row, (G, 1); 0 where a row has none."""
    largest = values.max(axis=1, initial=-np.inf, keepdims=True)
    return np.where(np.isfinite(largest), largest, 0.0)
