"""Seed-free tests of the tokens against their claim, for backends that decode speculatively at T > 0.

Null hypothesis: given what went before, each token was drawn from the claimed distribution after the request's
processors, temperature and truncation, by whatever noise. Speculative decoding keeps that distribution (it accepts or
resamples so that the target's law is unchanged) but not the noise of `policies.noise`.

Both tests are exact at every length; neither is asymptotic, and neither needs independent tokens, only that each was
drawn by its conditional law:

1. Probability integral transform. Cells: every listed token strictly above the k-th largest claimed logprob, in
   falling order, and the rest as one cell (k = 19 on chat, 20 on completions, so at most 21 cells). Which tokens those
   are does not depend on the token drawn, although a claim lists that one too. u = F(y−) + U·p(y) is then uniform on
   (0, 1), each given the past. The Dvoretzky–Kiefer–Wolfowitz inequality with Massart's constant bounds the largest
   distance of their empirical distribution: P(D ≥ d) ≤ 2·exp(−2·n·d²).
2. Cross-entropy. For every λ, exp(λ·S − Σ log E exp(λ·s)) with s = −log p(y), S = Σ s has mean at most 1 (it is the
   likelihood ratio of the claim raised to the power 1 − λ against the claim itself), and so has its average over
   `TILTS`: by Markov's inequality it exceeds 1/α with probability at most α. `z` is the usual standardised
   cross-entropy, only reported: its normal law is asymptotic.

The unlisted tail at T ≠ 1, and candidates at an undecided edge of a cut, have weights between bounds; every figure that
decides is the one most lenient within them. U comes from a hash of our own id of the response, which the backend cannot
choose. One generation is one unit of evidence.

What they see: another temperature or truncation, gross substitution. What they do not: a quantised generator under the
true model's claim (verification by seed needs a hundredth of the tokens). Hence no pass.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies._processors import Processed
from policies._race import LOWEST_TEMPERATURE
from policies._tails import binomial_tail
from policies._truncation import Survivors, survivors
from policies.checks import Check, Result
from policies.evidence import TOP_LOGPROBS, Evidence

NAME = "selection"
LEVEL = 1e-6
"""A reject's level, both tests together: each rejects at half of it."""
FAULTS = 1e-4
"""Rate per token at which an honest backend is taken to emit a token that the cuts exclude."""
TILTS = (-3.0, -1.0, -0.5, -0.25, -0.1, 0.1, 0.2, 0.4, 0.6, 0.8)
"""λ of the cross-entropy test: the claim raised to the power 1 − λ, from 4 (far colder) to 0.2 (far hotter)."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cells:
    """The claimed law of each token, over cells in falling order with the rest last; weights share one scale per row.

    Attributes:
        low, high: float64 (G, C), bounds on the weight of each cell.
        drawn: intp (G,), the cell of the token.
        usable: bool (G,), rows that say anything.
        excluded: bool (G,), tokens that a mask or cut certainly excludes.
    """

    low: _Floats
    high: _Floats
    drawn: NDArray[np.intp]
    usable: NDArray[np.bool_]
    excluded: NDArray[np.bool_]


def check(evidence: Evidence, claim: Processed, vocab_size: int) -> Check:
    """Rejects where the claimed law is untenable; else inconclusive with reason `speculative`, and never a pass.

    Metrics: `tokens`; `checked`; `excluded`, tokens that a mask or cut rules out; `pit`, the largest distance of the
    empirical distribution of u from the uniform (the most lenient within the bounds); `pit_log10` and
    `cross_entropy_log10`, log₁₀ of the two tests' levels; `z`, the standardised cross-entropy at the bounds' middle;
    `speculative`, 1. A reject's `level` is at most twice the smaller of the two, or P(Binomial(tokens, 1e-4) ≥
    excluded).
    """
    cells = cells_of(evidence, claim, vocab_size)
    tokens, checked = len(evidence.output_ids), int(cells.usable.sum())
    excluded = int(cells.excluded.sum())
    metrics: dict[str, float | int | None] = {"tokens": tokens, "checked": checked, "excluded": excluded}
    metrics["speculative"] = 1
    if not checked:
        return Check(NAME, Result.INCONCLUSIVE, "speculative: no token has a usable claim", metrics=metrics)
    distance = pit_distance(cells, _uniforms(evidence, len(cells.drawn)))
    log_pit = min(0.0, math.log(2) - 2 * checked * distance**2)
    log_tilt = min(0.0, -cross_entropy(cells))
    metrics |= {"pit": distance, "pit_log10": log_pit / math.log(10), "cross_entropy_log10": log_tilt / math.log(10)}
    metrics["z"] = _standardised(cells)
    fault_level = binomial_tail(tokens, FAULTS, excluded)
    if excluded and fault_level <= LEVEL:
        reason = f"not_sampled_from_claim: {excluded} of {tokens} tokens are ruled out by the request's own limits"
        return Check(NAME, Result.REJECT, reason, level=fault_level, metrics=metrics)
    level = min(1.0, 2 * math.exp(min(log_pit, log_tilt)))
    if level <= LEVEL:
        reason = "not_sampled_from_claim: the tokens do not follow the claimed distribution"
        return Check(NAME, Result.REJECT, reason, level=level, metrics=metrics)
    reason = (
        "speculative: drawn without the seed's noise, so the tokens are only compared with the claimed distribution"
    )
    return Check(NAME, Result.INCONCLUSIVE, reason, metrics=metrics)


def pit_distance(cells: Cells, uniforms: _Floats) -> float:
    """Distance of the empirical distribution of u from the uniform, as small as the bounds allow.

    Args:
        uniforms: float64 (G,), U of each row.
    """
    rows = np.flatnonzero(cells.usable)
    columns = np.arange(cells.low.shape[1])
    drawn = cells.drawn[rows, None]
    low, high = cells.low[rows], cells.high[rows]
    before, after = columns < drawn, columns > drawn
    own_low, own_high = low[np.arange(len(rows)), drawn[:, 0]], high[np.arange(len(rows)), drawn[:, 0]]
    u = uniforms[rows]
    # u = (A + U·w)/(A + w + B) rises with A and falls with B; in w it is monotone, either way.
    ends = [
        ((weight * before).sum(axis=1), (other * after).sum(axis=1)) for weight, other in ((low, high), (high, low))
    ]
    lowest, highest = (
        [(above + u * own) / np.maximum(above + own + below, 1e-300) for own in (own_low, own_high)]
        for above, below in ends
    )
    least, most = np.sort(np.minimum(*lowest)), np.sort(np.maximum(*highest))
    count = len(rows)
    steps = np.arange(1, count + 1) / count
    # F ≥ that of the largest u, and F ≤ that of the smallest.
    return float(max((steps - most).max(), (least - (steps - 1 / count)).max(), 0.0))


def cross_entropy(cells: Cells) -> float:
    """Natural log of the averaged likelihood ratio of `TILTS`, as small as the bounds allow."""
    rows = np.flatnonzero(cells.usable)
    low, high = cells.low[rows], cells.high[rows]
    own = np.arange(len(rows)), cells.drawn[rows]
    with np.errstate(divide="ignore"):
        own_low, own_high = np.log(low[own]), np.log(high[own])
        total = np.log(low.sum(axis=1))
        log_high = np.log(high)
    ratios = []
    for tilt in TILTS:
        power = 1.0 - tilt
        scale = log_high.max(axis=1, keepdims=True)
        normal = np.log(np.exp(power * (log_high - scale)).sum(axis=1)) + power * scale[:, 0]
        # −λ log w + log Z − log Σ w^(1−λ), each at its worst within the bounds.
        ratios.append(float((-tilt * (own_high if tilt > 0 else own_low) + total - normal).sum()))
    return float(np.logaddexp.reduce(ratios) - math.log(len(ratios)))


def _standardised(cells: Cells) -> float | None:
    middle = (cells.low + cells.high)[cells.usable] / 2
    share = middle / np.maximum(middle.sum(axis=1, keepdims=True), 1e-300)
    surprisal = -np.log(np.maximum(share, 1e-300))
    entropy = (share * surprisal).sum(axis=1)
    variance = (share * surprisal**2).sum(axis=1) - entropy**2
    own = surprisal[np.arange(len(share)), cells.drawn[cells.usable]]
    spread = float(np.maximum(variance, 0.0).sum())
    return float((own - entropy).sum() / math.sqrt(spread)) if spread > 1e-12 else None


def _uniforms(evidence: Evidence, count: int) -> _Floats:
    """U of each token, from our own id of the response; (count,)."""
    digest = hashlib.sha256(f"pit:{evidence.id}:{evidence.index}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest))).random(count)


def cells_of(evidence: Evidence, claim: Processed, vocab_size: int) -> Cells:
    """The cells of an answer at T > 0, from its processed claim."""
    temperature = max(evidence.sampling.temperature, LOWEST_TEMPERATURE)
    fate = survivors(claim, temperature, evidence.sampling, vocab_size, tail=True)
    rows = len(claim.logprobs)
    ids = evidence.claim_ids[:rows]
    usable = claim.listed[:, 0] & (ids[:, 0] == evidence.output_ids[:rows]) & ~claim.blank
    excluded = usable & fate.dropped[:, 0]
    raw = np.where(claim.listed, evidence.claim_logprobs[:rows], -np.inf)
    low, high, drawn = _weights(claim, fate, _own_cells(claim, raw, _ranks(evidence)), ids, temperature)
    return Cells(low, high, drawn, usable & ~excluded, excluded)


def _ranks(evidence: Evidence) -> int:
    """How many of the largest tokens every claim is sure to list, whatever was drawn."""
    return TOP_LOGPROBS if evidence.endpoint == "completions" else TOP_LOGPROBS - 1


def _own_cells(claim: Processed, raw: _Floats, ranks: int) -> NDArray[np.bool_]:
    """Listed tokens with a cell to themselves: those strictly above the last rank that is sure to be listed; (G, W).

    A tie at that rank goes to the rest, or the drawn token would decide who of the tied has a cell.
    """
    falling = -np.sort(-raw, axis=1)
    last = np.minimum(ranks, claim.listed.sum(axis=1) - 1) - 1
    bar = np.where(last >= 0, np.take_along_axis(falling, np.maximum(last, 0)[:, None], axis=1)[:, 0], np.inf)
    # A grammar that leaves fewer tokens than a claim has room for lists them all.
    bar = np.where(claim.complete, -np.inf, bar)
    own: NDArray[np.bool_] = claim.listed & (raw > bar[:, None])
    return own


def _weights(
    claim: Processed, fate: Survivors, own: NDArray[np.bool_], ids: NDArray[np.int32], temperature: float
) -> tuple[_Floats, _Floats, NDArray[np.intp]]:
    """Bounds on the weight of every cell, (G, W + 1), and the cell of the drawn token, (G,)."""
    assert fate.tail_low is not None
    assert fate.tail_high is not None
    rows, width = own.shape
    largest = claim.logprobs.max(axis=1, keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0.0)
    weights = np.where(claim.candidates, np.exp((claim.logprobs - largest) / temperature), 0.0)
    low, high = weights * fate.kept, weights * ~fate.dropped
    # What was drawn was in play.
    low[:, 0] = high[:, 0] = weights[:, 0]
    order = np.lexsort((ids, -weights, ~own), axis=1)
    in_order = np.take_along_axis(own, order, axis=1)
    cells_low, cells_high = np.zeros((rows, width + 1)), np.zeros((rows, width + 1))
    cells_low[:, :width] = np.where(in_order, np.take_along_axis(low, order, axis=1), 0.0)
    cells_high[:, :width] = np.where(in_order, np.take_along_axis(high, order, axis=1), 0.0)
    cells_low[:, width] = (low * ~own).sum(axis=1) + fate.tail_low
    cells_high[:, width] = (high * ~own).sum(axis=1) + fate.tail_high
    drawn = np.where(own[:, 0], np.argmax(order == 0, axis=1), width)
    return cells_low, cells_high, drawn
