"""Did the tokens come out of the claimed logprobs, by the request's seed and sampling parameters?

Null hypothesis: the backend sampled these tokens from the very logits whose logprobs it claims, with the declared
runtime's sampler, the seed it was given and the parameters it was asked for. Then at T > 0 the sampled token
attains max(logprob/T + gumbel) over every subset of the candidates in play that holds it, the claimed top 20
among them; at T = 0 it attains the largest claimed logprob. Both hold exactly, up to fp32 rounding and ties; no
calibration and no reference is needed. Measured on vLLM 0.32: 0 violations in 22,805 honest tokens, against
37–62 % with the seed off by one and 1–9 % when the claim comes from a second pass of the true model. A grammar masks
logits before the sampler and before the logprobs alike, so the null holds there, and violations reject; but nobody can
hold such a claim against a replay, so an answer without any is `grammar` and no pass. Logit bias, allowed ids, bad
words, `min_tokens` and the additive penalties are replayed (`policies._processors`), a repetition penalty is not.
A thinking budget forces the end of reasoning, at one place that follows from the request: only that tag is left out.

The margin is Token-DiFR's (arXiv 2511.20621) with the claim in place of a replay, which makes its null exact.

One generation is one unit of evidence: it is rejected or not. Its tokens share a prompt and whatever fault made one of
them violate, so a rate per token is never multiplied over them beyond the stated contamination.

The null says nothing of the model itself: a cheap model that reports its own logprobs passes, and `distance`
must find it.

Speculative decoding draws by other noise. Where it is declared, T = 0 is checked as ever and T > 0 falls back on
`policies.seedfree`, which rejects or says nothing, and never passes. Where the declared noise is violated, every other
known one is tried: an answer that fits one of them shows that the runtime changed, and proves no cheating.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from policies import _grammar, _race, noise, seedfree
from policies._processors import Processed, bad_word_ids
from policies._race import Outcome
from policies._replayable import no_race, not_replayable, processed
from policies._tails import binomial_tail
from policies._truncation import MOST_TOKENS
from policies.checks import Check, Result
from policies.evidence import Evidence
from policies.thinking import FORCED_TOKENS, UNKNOWN, Forced, Tags, forced

__all__ = [
    "bad_word_ids",
    "check",
    "fit",
    "fitting_runtime",
    "no_race",
    "not_replayable",
    "processed",
    "standing_cap",
]

NAME = "selection"
CONTAMINATION = 1e-4
"""Rate per token at which an honest backend is taken to violate anyway (faults, unknown corner cases); the
level of a reject is computed under it."""
REJECT_LEVEL = 0.05
"""No reject is stated at a higher level: one violation rejects up to 512 tokens, two up to 3,500. Fewer than that in
a long answer are inconclusive."""
FAULT_RATE = 1e-3
"""Rate per generation at which an honest backend is taken to be rejected here, for evidence over many generations.
Measured: none of the recorded honest generations is."""
MOST_SKIPPED = 0.2
"""Share of tokens whose test may hang on an undecided edge before the check says nothing."""
FIT_LEVEL = 1e-6
"""Probability, at most, that tokens drawn by no known noise fit another one as well as they must for `runtime_changed`:
given the tokens and the claim, fresh Gumbel noise crowns each of them with its own share of the weight."""
DOUBT_LEVEL = 1e-2
"""The same probability, at most, for a fit that only keeps an answer from being rejected (`runtime_unclear`): a short
answer of a backend that changed its runtime is no fraud, and a cheat escapes by such luck once in a hundred."""
SPECULATIVE_STANDING = "trial"
"""Highest standing of a backend declared speculative: at T > 0 its tokens are never tied to a seed."""

FORCED = "forced_unclear: the request's thinking_token_budget may have forced these tokens, or not"
_CHANGED = "runtime_changed"


def check(
    evidence: Evidence,
    *,
    vocab_size: int | None = None,
    eos_token_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] | None = None,
    tags: Tags = UNKNOWN,
    declaration_expired: bool = False,
) -> Check:
    """The selection check of one generation, complete or not.

    Args:
        vocab_size: sharpens top-p at T > 1; without it a safe bound is used.
        eos_token_ids: ids that end an answer, without which `min_tokens` cannot be replayed.
        bad_words: what the tokenizer makes of the request's `bad_words` (`bad_word_ids`); None when unknown.
        tags: tokens that open and close reasoning, without which it is not known what a thinking budget forces.
        declaration_expired: this backend's declared runtime was contradicted and not declared anew.

    Metrics: `tokens`; `checked`, tokens whose outcome is decided; `skipped`, tokens whose outcome hangs on a
    candidate at an undecided edge of top-k, top-p or min-p, or whose claim is unusable; `violations`;
    `violation_rate` of the checked; `worst_margin` in Gumbel units (nats at T = 0); `first_violation`, 0-based
    position. A reject's `level` is P(Binomial(tokens, 1e-4) ≥ violations), and at most `REJECT_LEVEL`. Where another
    runtime's noise was tried, `fit_log10` is the best fit's log₁₀ probability under fresh noise. At T > 0 under
    speculative decoding the metrics are those of `seedfree.check`.
    """
    tokens = len(evidence.output_ids)
    masked, by_request = _grammar.obstacle(evidence)
    evidence = _grammar.as_masked(evidence)
    budget = forced(evidence, tags)
    excuse = not_replayable(evidence, eos_token_ids, bad_words)
    seedless = evidence.speculative and evidence.sampling.temperature > 0
    if excuse:
        # The request is no excuse where the backend could not have been tested anyway.
        untestable = declaration_expired or seedless
        return Check(NAME, Result.INCONCLUSIVE, excuse, by_request=not untestable, metrics={"tokens": tokens})
    obstacle = _obstacle(evidence, declaration_expired)
    if obstacle:
        return Check(NAME, Result.INCONCLUSIVE, obstacle, metrics={"tokens": tokens})
    claim = processed(evidence, eos_token_ids, bad_words)
    vocab_size = vocab_size or MOST_TOKENS
    if seedless:
        if budget.any():
            return Check(NAME, Result.INCONCLUSIVE, FORCED, metrics={"tokens": tokens})
        return seedfree.check(evidence, claim, vocab_size)
    outcome = _race.run(evidence, claim, evidence.runtime, vocab_size)
    if budget.surely.any():
        outcome = dataclasses.replace(outcome, violation=outcome.violation & ~budget.surely)
    changed = _changed(evidence, claim, vocab_size) if outcome.violation.any() else None
    if _only_ends(outcome, evidence, tags.closing):
        reason = "forced_end: only ends of reasoning lose, and this runtime may force another request's upon an answer"
        return Check(NAME, Result.INCONCLUSIVE, reason, metrics=_metrics(outcome, tokens))
    found = _judged(outcome, tokens, changed, _maybe_forced(outcome, evidence, budget))
    if found.result is Result.PASS and masked:
        # No replay can be held against such a claim, so one that was made up for these tokens would do as well.
        return dataclasses.replace(found, result=Result.INCONCLUSIVE, reason=masked, by_request=by_request)
    return found


def fit(
    evidence: Evidence,
    runtime: str,
    *,
    vocab_size: int | None = None,
    eos_token_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] | None = None,
) -> Outcome | None:
    """How the tokens of one generation at T > 0 fare under the noise of any known runtime; None when untestable."""
    if not_replayable(evidence, eos_token_ids, bad_words) or no_race(evidence, runtime):
        return None
    if forced(evidence, UNKNOWN).any():
        return None
    claim = processed(evidence, eos_token_ids, bad_words)
    return _race.run(evidence, claim, runtime, vocab_size or MOST_TOKENS)


def fitting_runtime(reason: str) -> str | None:
    """The runtime that a check's reason says the tokens fit, where it says `runtime_changed`."""
    head, _, rest = reason.partition(": the tokens fit ")
    return rest.split(",", 1)[0] if head == _CHANGED and rest else None


def standing_cap(evidence: Evidence) -> str | None:
    """The highest standing that this generation's backend can earn, where its declaration limits it."""
    return SPECULATIVE_STANDING if evidence.speculative else None


def _obstacle(evidence: Evidence, declaration_expired: bool) -> str:
    """Why nothing can be tested, or nothing."""
    sampling = evidence.sampling
    if not len(evidence.output_ids):
        return "no_tokens: there is no output to test"
    if not evidence.claim_ids.size or evidence.claim_ids.shape != evidence.claim_logprobs.shape:
        return "no_claim: there are no claimed logprobs to test against"
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return "bad_temperature: the temperature is no number of 0 or more"
    if sampling.temperature == 0 or evidence.speculative:
        return ""
    if declaration_expired:
        return (
            f"declaration_expired: earlier answers did not fit the declared runtime {evidence.runtime!r}; "
            "declare another or accept it again"
        )
    return no_race(evidence, evidence.runtime)


def _changed(evidence: Evidence, claim: Processed, vocab_size: int) -> tuple[str, float] | None:
    """The other runtime whose noise the tokens fit without a violation, hardly by chance, and that log chance."""
    if evidence.sampling.temperature == 0:
        return None
    fits: list[tuple[float, str]] = []
    for name in noise.RUNTIMES:
        if name == evidence.runtime or no_race(evidence, name):
            continue
        outcome = _race.run(evidence, claim, name, vocab_size)
        chance = float(outcome.chance.sum())
        if not outcome.violation.any() and chance <= math.log(DOUBT_LEVEL):
            fits.append((chance, name))
    if not fits:
        return None
    chance, name = min(fits)
    return name, chance


def _maybe_forced(outcome: Outcome, evidence: Evidence, budget: Forced) -> int:
    """Violations that the request's thinking budget may explain. Where it is not known where reasoning begins and ends,
    those are the stretch that holds the most of them, and more tokens like them: a server forces the same each time."""
    at = np.flatnonzero(outcome.violation & budget.maybe)
    if not budget.anywhere or not len(at):
        return len(at)
    within = np.searchsorted(at, at + FORCED_TOKENS) - np.arange(len(at))
    first = int(within.argmax())
    ids = evidence.output_ids[at]
    return int(np.isin(ids, ids[first : first + within[first]]).sum())


def _only_ends(outcome: Outcome, evidence: Evidence, closing_ids: Iterable[int]) -> bool:
    """Whether every token that loses ends reasoning, on a runtime that forces one request's budget upon another.

    vLLM 0.32's V1 runner keeps budgets by row, and one that moves into the row of a finished request inherits what was
    left of it (seen once in 300 mixed requests, eight at a time).
    """
    runtime = noise.RUNTIMES.get(evidence.runtime)
    if runtime is None or runtime.needs_prompt or not outcome.violation.any():
        return False
    return bool(np.isin(evidence.output_ids[outcome.violation], list(closing_ids)).all())


def _metrics(outcome: Outcome, tokens: int) -> dict[str, float | int | None]:
    violations, skipped = int(outcome.violation.sum()), int(outcome.skipped.sum())
    checked = tokens - skipped
    return {
        "tokens": tokens,
        "checked": checked,
        "skipped": skipped,
        "violations": violations,
        "violation_rate": violations / checked if checked else None,
        "worst_margin": float(outcome.margin.max()),
        "first_violation": int(outcome.violation.argmax()) if violations else None,
    }


def _judged(outcome: Outcome, tokens: int, changed: tuple[str, float] | None, maybe_forced: int) -> Check:
    metrics = _metrics(outcome, tokens)
    violations, skipped = int(outcome.violation.sum()), int(outcome.skipped.sum())
    checked = tokens - skipped
    if violations:
        words = f"{violations} of {checked} tokens do not win under the claimed logprobs"
        if changed is not None:
            name, chance = changed
            metrics["fit_log10"] = chance / math.log(10)
            reason = f"{_CHANGED}: the tokens fit {name}, not the declared runtime"
            if chance > math.log(FIT_LEVEL):
                reason = f"runtime_unclear: {words}, but they fit {name}, and are too few to tell"
            return Check(NAME, Result.INCONCLUSIVE, reason, metrics=metrics)
        if violations == maybe_forced:
            return Check(NAME, Result.INCONCLUSIVE, FORCED, metrics=metrics)
        level = binomial_tail(tokens, CONTAMINATION, violations - maybe_forced)
        if level > REJECT_LEVEL:
            return Check(NAME, Result.INCONCLUSIVE, f"few_violations: {words}", metrics=metrics)
        return Check(NAME, Result.REJECT, f"not_sampled_from_claim: {words}", level=level, metrics=metrics)
    if skipped > MOST_SKIPPED * tokens:
        reason = f"undecided: the outcome of {skipped} of {tokens} tokens cannot be decided"
        return Check(NAME, Result.INCONCLUSIVE, reason, metrics=metrics)
    return Check(NAME, Result.PASS, metrics=metrics)
