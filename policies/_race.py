"""Which tokens of an answer lose under their claimed logprobs: the race of every candidate against the sampled one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies import noise
from policies._processors import LOGPROB_ROUNDING, Processed
from policies._truncation import survivors
from policies.evidence import Evidence

MARGIN_TOLERANCE = 1e-3
"""Gumbel units by which a sampled token may lose at T > 0: fp32 noise and sums. What logprobs may be off, divided by
T, is added."""
ARGMAX_TOLERANCE = 1e-6
"""Nats by which a sampled token may lie under the claimed maximum at T = 0; ties are exact."""
LOWEST_TEMPERATURE = 0.01
"""vLLM raises 0 < T < 0.01 to this."""

_Floats = NDArray[np.float64]
_Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Per token, (G,): by how much it lost (0 when it won), whether that is a violation, whether nothing can be said.

    `chance` is the natural log of the probability that it would have won under noise drawn anew, at most: its share
    of the weight of the claimed candidates in play. 0 where nothing can be said, and at T = 0.
    """

    margin: _Floats
    violation: _Flags
    skipped: _Flags
    chance: _Floats


def run(evidence: Evidence, claim: Processed, runtime: str, vocab_size: int) -> Outcome:
    """Race every token of an answer under the noise of `runtime`.

    Args:
        claim: the rows of the claim, at most one per token.
        runtime: a key of `noise.RUNTIMES`; plays no part at T = 0.
        vocab_size: bound on the number of tokens.
    """
    tokens, rows = len(evidence.output_ids), len(claim.logprobs)
    usable = claim.listed[:, 0] & (evidence.claim_ids[:rows, 0] == evidence.output_ids[:rows]) & ~claim.blank
    # vLLM cannot draw what the request masks; the rest of the race is then no matter.
    masked = usable & ~claim.candidates[:, 0]
    if evidence.sampling.temperature == 0:
        margin = claim.logprobs.max(axis=1) - np.where(claim.candidates[:, 0], claim.logprobs[:, 0], np.inf)
        violation = margin > ARGMAX_TOLERANCE + claim.rounding
        hanging, chance = np.zeros(rows, bool), np.zeros(rows)
    else:
        margin, violation, hanging, chance = _raced(evidence, claim, runtime, vocab_size)
    violation = (violation | masked) & usable
    decided = usable & ~(hanging & ~violation)
    outcome = Outcome(np.zeros(tokens), np.zeros(tokens, bool), np.ones(tokens, bool), np.zeros(tokens))
    outcome.margin[:rows] = np.where(usable & np.isfinite(margin), np.maximum(margin, 0.0), 0.0)
    outcome.violation[:rows] = violation
    outcome.skipped[:rows] = ~decided
    outcome.chance[:rows] = np.where(decided, chance, 0.0)
    return outcome


def _raced(
    evidence: Evidence, claim: Processed, runtime: str, vocab_size: int
) -> tuple[_Floats, _Flags, _Flags, _Floats]:
    """Margin, violation, undecided outcome and log chance of each token at T > 0."""
    sampling = evidence.sampling
    temperature = max(sampling.temperature, LOWEST_TEMPERATURE)
    tolerance = MARGIN_TOLERANCE + (LOGPROB_ROUNDING + claim.rounding) / temperature
    assert sampling.seed is not None
    ids = evidence.claim_ids[: len(claim.logprobs)]
    gumbel = noise.gumbel(runtime, sampling.seed, len(evidence.prompt_ids), ids)
    assert gumbel is not None
    fate = survivors(claim, temperature, sampling, vocab_size)
    scaled = claim.logprobs / temperature
    scores = np.where(claim.candidates, scaled + gumbel, -np.inf)
    drawable = claim.candidates[:, 0]
    own = np.where(drawable, scores[:, 0], 0.0)
    margin = np.where(fate.kept, scores, -np.inf).max(axis=1) - own
    # A token that the cuts exclude can never have been drawn.
    violation = (margin > tolerance) | fate.dropped[:, 0]
    undecided = ~fate.kept & ~fate.dropped
    rival = np.where(undecided[:, 1:], scores[:, 1:], -np.inf).max(axis=1, initial=-np.inf)
    hanging = undecided[:, 0] | (rival > own + tolerance)
    return margin, violation, hanging, _log_share(scaled, fate.kept, drawable)


def _log_share(scaled: _Floats, kept: _Flags, drawable: _Flags) -> _Floats:
    """Log of the first candidate's weight over that of every kept one; (G,)."""
    inside = kept.copy()
    inside[:, 0] = True
    values = np.where(inside, scaled, -np.inf)
    values[:, 0] = np.where(drawable, scaled[:, 0], 0.0)
    largest = values.max(axis=1)
    total = np.log(np.exp(values - largest[:, None]).sum(axis=1)) + largest
    share: _Floats = values[:, 0] - total
    return share
