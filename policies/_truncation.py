"""Which claimed candidates top-k, top-p and min-p leave in play, as far as a claim can tell.

vLLM divides logits by T, then cuts by min-p, by top-k, and last by top-p over the renormalised rest. A claim
shows the top of the distribution exactly; of everything else it shows the total mass M = 1 − Σ p and that no
token there beats the least of the listed alternatives, p₂₀ (nor M itself). At temperature T the unlisted weight
Σ p^(1/T) then lies between M·p₂₀^(1/T − 1) and V^(1 − 1/T)·M^(1/T), the mass in as few or as many tokens as it can
be; which of the two is the larger depends on T. The larger never exceeds (V − 20)·p₂₀^(1/T), every unlisted token at
its cap, and that bound is applied too: so the one used is never looser. Tokens that the request itself shifts are
bounded one by one (`policies._processors`). Candidates whose fate all that leaves open are neither kept nor dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies._processors import Processed, Unlisted
from policies.evidence import Sampling

MOST_TOKENS = 2**18
"""Stands in for an undeclared vocabulary's size in the bound above; larger than any vLLM serves today."""
EDGE = 1e-3
"""Half-width of the undecided edge: of top-p in probability, of min-p in log weight. vLLM's own cuts are made
from fp32 sums over the vocabulary and, on a GPU, by a pivot search; without an edge 2 of 3,778 honest tokens
fell on the wrong side of a nucleus of 0.9 (H200)."""
TIE = 1e-6
"""Scaled logprobs this close count as tied; which of them a cut takes is arbitrary. Where the request shifts logits,
what that may be off is added."""

_Floats = NDArray[np.float64]
_Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Survivors:
    """Fate of each candidate and of the rest.

    Attributes:
        kept, dropped: bool (G, W), certainly in play, certainly cut. Neither: undecided.
        tail_low, tail_high: float64 (G,), weight of all unlisted tokens in play, relative to the largest candidate's;
            None where nothing needed it.
    """

    kept: _Flags
    dropped: _Flags
    tail_low: _Floats | None = None
    tail_high: _Floats | None = None


def survivors(
    claim: Processed, temperature: float, sampling: Sampling, vocab_size: int, *, tail: bool = False
) -> Survivors:
    """Applies the request's truncation to a claim.

    Args:
        temperature: above 0.
        vocab_size: bound on the number of tokens.
        tail: bound the unlisted weight even where no cut needs it.
    """
    candidates = claim.candidates
    cut = sampling.min_p > 0 or sampling.top_k > 0
    if not (cut or sampling.top_p < 1):
        if not tail:
            return Survivors(candidates, ~candidates)
        low, high = _tail(claim, _row_max(claim.logprobs), temperature, vocab_size)
        return Survivors(candidates, ~candidates, low, high)
    largest = _row_max(claim.logprobs)
    scaled = np.where(candidates, claim.logprobs - largest, -np.inf) / temperature
    weights = np.exp(scaled)
    highest = claim.unlisted.highest()
    tie = (TIE + claim.rounding / temperature)[:, None]
    above = _unlisted_above(claim, temperature, tie)
    rank = _ranked(scaled, weights, tie)
    most_rank = rank.most + above

    kept = candidates.copy()
    dropped = ~candidates
    if sampling.min_p > 0:
        edge, width = np.log(sampling.min_p), EDGE + tie
        # The largest of all may be unlisted.
        over = np.maximum(highest[:, None] - largest, 0.0) / temperature
        kept &= scaled - over >= edge + width
        dropped |= scaled < edge - width
    few = _fewer_than_k(kept, claim.unlisted.open, sampling)
    if sampling.top_k > 0:
        kept &= most_rank < sampling.top_k
        dropped |= rank.least >= sampling.top_k
    first = candidates & (most_rank == 0)
    low, high = _tail(claim, largest, temperature, vocab_size)
    # Cuts are thresholds: where a listed alternative falls that no unlisted token outranks, every unlisted token falls.
    # Counting k tokens would not do, because a tie at the k-th keeps more than k.
    gone = (dropped & candidates & (claim.logprobs >= highest[:, None]))[:, 1:].any(axis=1)
    if cut:
        low, high = np.zeros_like(low), np.where(gone, 0.0, high)
    if sampling.top_p < 1:
        total_low = ((weights * kept).sum(axis=1) + low)[:, None]
        total_high = ((weights * ~dropped).sum(axis=1) + high)[:, None]
        most = rank.most_weight + np.where(above > 0, high[:, None], 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            kept &= most < (sampling.top_p - EDGE) * total_low
            dropped |= rank.least_weight >= (sampling.top_p + EDGE) * total_high
        gone |= (dropped & ~first & candidates & (claim.logprobs >= highest[:, None]))[:, 1:].any(axis=1)
        low, high = np.zeros_like(low), np.where(gone, 0.0, high)
    kept &= ~few[:, None]
    # The single largest candidate survives every cut.
    return Survivors((kept | first) & candidates, dropped & ~first, low, high)


def _fewer_than_k(kept: _Flags, open_rows: _Flags, sampling: Sampling) -> _Flags:
    """Rows in which fewer than k tokens may be left for top-k, with a top-p cut after it; bool (G,).

    There vLLM 0.32's GPU kernel can cut tokens that top-p should keep: with k = 5, p = 0.6 and min-p = 0.1, on an
    H200, 4 of 82 tokens lost to nobody but the largest (two candidates left, of weights 1 and 0.86).
    """
    if not (sampling.top_k > 0 and sampling.top_p < 1):
        return np.zeros(len(kept), np.bool_)
    few: _Flags = (kept.sum(axis=1) < sampling.top_k) & (~open_rows | (sampling.min_p > 0))
    return few


def _unlisted_above(claim: Processed, temperature: float, tie: _Floats) -> _Floats:
    """How many unlisted tokens may outrank each candidate, at most; (G, W). `tie` is (G, 1), of scaled logprobs."""
    rest = claim.unlisted
    shifted = claim.logprobs
    # Of raw probability p there are no more than M/p.
    with np.errstate(over="ignore"):
        ordinary = np.floor(rest.mass[:, None] * np.exp(-np.where(claim.candidates, shifted, 0.0)))
    above: _Floats = np.where(rest.open[:, None] & (shifted < rest.cap[:, None]), ordinary, 0.0)
    lifted = shifted < (rest.cap + rest.lift)[:, None] + tie * temperature
    above += np.where(lifted, rest.extra[:, None], 0)
    return above


@dataclass(frozen=True, slots=True)
class _Ranked:
    """How many candidates, of what weight, stand before each one, with ties counted not at all or in full."""

    least: NDArray[np.int64]
    most: NDArray[np.int64]
    least_weight: _Floats
    most_weight: _Floats


def _ranked(scaled: _Floats, weights: _Floats, tie: _Floats) -> _Ranked:
    width = scaled.shape[1]
    order = np.argsort(-scaled, axis=1)
    values = np.take_along_axis(scaled, order, axis=1)
    sorted_weights = np.take_along_axis(weights, order, axis=1)
    columns = np.broadcast_to(np.arange(width), scaled.shape)
    # A run of ties begins where a value lies clearly below the one before it.
    begins = np.ones(scaled.shape, bool)
    begins[:, 1:] = values[:, 1:] < values[:, :-1] - tie
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


def _tail(claim: Processed, largest: _Floats, temperature: float, vocab_size: int) -> tuple[_Floats, _Floats]:
    """Bounds on the unlisted weight before any cut, relative to the largest candidate's; (G,) each."""
    rest, inverse, base = claim.unlisted, 1.0 / temperature, largest[:, 0] / temperature
    tokens = np.maximum(vocab_size - rest.listed, 1)
    ordinary = np.maximum(*_spread(rest, rest.mass, inverse, tokens))
    ordinary = np.minimum(ordinary, np.log(tokens) + inverse * rest.cap) - base
    with np.errstate(divide="ignore"):
        lifted = np.log(rest.extra) + inverse * (rest.cap + rest.lift) - base
    one_by_one = np.where(rest.open, _exp(ordinary), 0.0) + _exp(lifted)
    high = np.minimum(one_by_one, _exp(ordinary + inverse * rest.lift))
    high = np.where(rest.open | (rest.extra > 0), high, 0.0)
    low = _exp(np.minimum(*_spread(rest, rest.least_mass, inverse, tokens)) - base)
    return np.minimum(low, high), high


def _spread(rest: Unlisted, mass: _Floats, inverse: float, tokens: NDArray[np.int64]) -> tuple[_Floats, _Floats]:
    """Log weight at 1/T = `inverse` of a mass in as few tokens as can be, and in as many."""
    with np.errstate(divide="ignore"):
        log_mass = np.log(mass)
    return log_mass + (inverse - 1.0) * rest.cap, (1.0 - inverse) * np.log(tokens) + inverse * log_mass


def _exp(values: _Floats) -> _Floats:
    # Impossible claims must not overflow.
    result: _Floats = np.exp(np.minimum(values, 600.0))
    return result


def _row_max(values: _Floats) -> _Floats:
    """Largest of each row, (G, 1); 0 where a row has none."""
    largest = values.max(axis=1, initial=-np.inf, keepdims=True)
    return np.where(np.isfinite(largest), largest, 0.0)
