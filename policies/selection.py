"""Did the tokens come out of the claimed logprobs, by the request's seed and sampling parameters?

Null hypothesis: the backend sampled these tokens from the very logits whose logprobs it claims, with the declared
runtime's sampler, the seed it was given and the parameters it was asked for. Then at T > 0 the sampled token
attains max(logprob/T + gumbel) over every subset of the candidates in play that holds it, the claimed top 20
among them; at T = 0 it attains the largest claimed logprob. Both hold exactly, up to fp32 rounding and ties; no
calibration and no reference is needed. Measured on vLLM 0.32: 0 violations in 22,805 honest tokens, against
37–62 % with the seed off by one and 1–9 % when the claim comes from a second pass of the true model.

The margin is Token-DiFR's (arXiv 2511.20621) with the claim in place of a replay, which makes its null exact.

The null says nothing of the model itself: a cheap model that reports its own logprobs passes, and `distance`
must find it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies import noise
from policies._request import extras
from policies._tails import binomial_tail
from policies._truncation import MOST_TOKENS, survivors
from policies.checks import Check, Result
from policies.evidence import MASKED, Evidence

NAME = "selection"
MARGIN_TOLERANCE = 1e-3
"""Gumbel units by which a sampled token may lose at T > 0: fp32 noise and sums."""
LOGPROB_ROUNDING = 1e-5
"""Nats by which an fp32 logprob may be off; divided by T it joins the tolerance."""
ARGMAX_TOLERANCE = 1e-6
"""Nats by which a sampled token may lie under the claimed maximum at T = 0; ties are exact."""
CONTAMINATION = 1e-4
"""Rate per token at which an honest backend is taken to violate anyway (faults, unknown corner cases); the
level of a reject is computed under it."""
REJECT_LEVEL = 0.05
"""No reject is stated at a higher level: one violation rejects up to 512 tokens, two up to 3,500. Fewer than that in
a long answer are inconclusive."""
MOST_SKIPPED = 0.2
"""Share of tokens whose test may hang on an undecided edge before the check says nothing."""
LOWEST_TEMPERATURE = 0.01
"""vLLM raises 0 < T < 0.01 to this."""

_Floats = NDArray[np.float64]
_Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Per token: by how much it lost (0 when it won), whether that is a violation, whether nothing can be said."""

    margin: _Floats
    violation: _Flags
    skipped: _Flags


def check(evidence: Evidence, *, vocab_size: int | None = None) -> Check:
    """The selection check of one generation, complete or not.

    `vocab_size` sharpens top-p at T > 1; without it a safe bound is used.

    Metrics: `tokens`; `checked`, tokens whose outcome is decided; `skipped`, tokens whose outcome hangs on a
    candidate at an undecided edge of top-k, top-p or min-p, or whose claim is unusable; `violations`;
    `violation_rate` of the checked; `worst_margin` in Gumbel units (nats at T = 0); `first_violation`, 0-based
    position. A reject's `level` is P(Binomial(tokens, 1e-4) ≥ violations), and at most `REJECT_LEVEL`.
    """
    tokens = len(evidence.output_ids)
    not_replayable = _not_replayable(evidence)
    if not_replayable:
        return Check(NAME, Result.INCONCLUSIVE, not_replayable, by_request=True, metrics={"tokens": tokens})
    obstacle = _obstacle(evidence)
    if obstacle:
        return Check(NAME, Result.INCONCLUSIVE, obstacle, metrics={"tokens": tokens})
    return _judged(_outcome(evidence, vocab_size or MOST_TOKENS), tokens)


def _not_replayable(evidence: Evidence) -> str:
    """The request's parameter that changes logits or noise before sampling in a way not replayed here."""
    sampling, others = evidence.sampling, extras(evidence)
    changed = {
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "presence_penalty": sampling.presence_penalty != 0.0,
        "frequency_penalty": sampling.frequency_penalty != 0.0,
        "logit_bias": bool(sampling.logit_bias),
        "allowed_token_ids": bool(sampling.allowed_token_ids),
        "bad_words": bool(sampling.bad_words),
        "min_tokens": sampling.min_tokens > 0,
        "thinking_token_budget": others.thinking_token_budget is not None,
        "watermarking": bool(others.watermarking),
    }
    names = [name for name, is_changed in changed.items() if is_changed]
    return f"not_replayed: the request sets {', '.join(names)}" if names else ""


def _obstacle(evidence: Evidence) -> str:
    """Why nothing can be tested, or nothing."""
    sampling = evidence.sampling
    if not len(evidence.output_ids):
        return "no_tokens: there is no output to test"
    if not evidence.claim_ids.size or evidence.claim_ids.shape != evidence.claim_logprobs.shape:
        return "no_claim: there are no claimed logprobs to test against"
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return "bad_temperature: the temperature is no number of 0 or more"
    if sampling.temperature == 0:
        return ""
    runtime = noise.RUNTIMES.get(evidence.runtime)
    if runtime is None:
        return f"unknown_runtime: the sampling noise of {evidence.runtime or 'an undeclared runtime'!r} is not known"
    # vLLM takes −1 for no seed.
    if sampling.seed is None or sampling.seed == -1:
        return "no_seed: the request went up without a seed"
    if runtime.needs_prompt and not len(evidence.prompt_ids):
        return "no_prompt_ids: the noise depends on the prompt's length, which is not known"
    return ""


def _outcome(evidence: Evidence, vocab_size: int) -> _Outcome:
    tokens = len(evidence.output_ids)
    rows = min(tokens, len(evidence.claim_ids))
    ids = evidence.claim_ids[:rows]
    logprobs = evidence.claim_logprobs[:rows].astype(np.float64)
    candidates = (ids >= 0) & np.isfinite(logprobs) & (logprobs > MASKED)
    complete: _Flags = np.any((ids >= 0) & (logprobs <= MASKED), axis=1)
    usable = candidates[:, 0] & (ids[:, 0] == evidence.output_ids[:rows])
    logprobs = np.where(candidates, logprobs, -np.inf)
    if evidence.sampling.temperature == 0:
        margin = logprobs.max(axis=1) - np.where(usable, logprobs[:, 0], np.inf)
        violation = margin > ARGMAX_TOLERANCE
        hanging = np.zeros(rows, bool)
    else:
        margin, violation, hanging = _raced(evidence, ids, logprobs, candidates, complete, vocab_size)
    violation &= usable
    skipped = np.ones(tokens, bool)
    skipped[:rows] = ~usable | (hanging & ~violation)
    full_violation = np.zeros(tokens, bool)
    full_violation[:rows] = violation
    full_margin = np.zeros(tokens)
    full_margin[:rows] = np.where(usable & np.isfinite(margin), np.maximum(margin, 0.0), 0.0)
    return _Outcome(full_margin, full_violation, skipped)


def _raced(
    evidence: Evidence,
    ids: NDArray[np.int32],
    logprobs: _Floats,
    candidates: _Flags,
    complete: _Flags,
    vocab_size: int,
) -> tuple[_Floats, _Flags, _Flags]:
    """Margin, violation and undecided outcome of each token at T > 0."""
    sampling = evidence.sampling
    temperature = max(sampling.temperature, LOWEST_TEMPERATURE)
    tolerance = MARGIN_TOLERANCE + LOGPROB_ROUNDING / temperature
    assert sampling.seed is not None
    gumbel = noise.gumbel(evidence.runtime, sampling.seed, len(evidence.prompt_ids), ids)
    assert gumbel is not None
    fate = survivors(logprobs, candidates, complete, temperature, sampling, vocab_size)
    scores = np.where(candidates, logprobs / temperature + gumbel, -np.inf)
    own = np.where(candidates[:, 0], scores[:, 0], 0.0)
    margin = np.where(fate.kept, scores, -np.inf).max(axis=1) - own
    # A token that the cuts exclude can never have been drawn.
    violation = (margin > tolerance) | fate.dropped[:, 0]
    undecided = ~fate.kept & ~fate.dropped
    rival = np.where(undecided[:, 1:], scores[:, 1:], -np.inf).max(axis=1, initial=-np.inf)
    return margin, violation, undecided[:, 0] | (rival > own + tolerance)


def _judged(outcome: _Outcome, tokens: int) -> Check:
    violations = int(outcome.violation.sum())
    skipped = int(outcome.skipped.sum())
    checked = tokens - skipped
    metrics: dict[str, float | int | None] = {
        "tokens": tokens,
        "checked": checked,
        "skipped": skipped,
        "violations": violations,
        "violation_rate": violations / checked if checked else None,
        "worst_margin": float(outcome.margin.max()),
        "first_violation": int(outcome.violation.argmax()) if violations else None,
    }
    if violations:
        level = binomial_tail(tokens, CONTAMINATION, violations)
        words = f"{violations} of {checked} tokens do not win under the claimed logprobs"
        if level > REJECT_LEVEL:
            return Check(NAME, Result.INCONCLUSIVE, f"few_violations: {words}", metrics=metrics)
        return Check(NAME, Result.REJECT, f"not_sampled_from_claim: {words}", level=level, metrics=metrics)
    if skipped > MOST_SKIPPED * tokens:
        reason = f"undecided: the outcome of {skipped} of {tokens} tokens cannot be decided"
        return Check(NAME, Result.INCONCLUSIVE, reason, metrics=metrics)
    return Check(NAME, Result.PASS, metrics=metrics)
