"""The structure check's statistical rules: answers that are possible, and that an honest backend all but never gives.

Each has its own null, in its own module: `_canonical` (measured), `hazard` (exact in law under the claim), and the
repeated answer (exact in law under the claim, see `repeated_findings`). A rule rejects only at a tiny stated level.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from policies import _canonical, hazard
from policies._findings import Finding, rejected
from policies.evidence import Evidence
from policies.spelling import Spelling
from policies.thinking import UNKNOWN, Tags, tags_of

REPEATED_LEVEL = 1e-6

Metrics = dict[str, float | int | None]


@dataclass(frozen=True, slots=True)
class Earlier:
    """What is remembered of a backend's earlier answers to the same prompt and sampling parameters.

    Attributes:
        answers: distinct answers, at least 1 where `same` is above 0.
        same: how many of them are this very answer, drawn by another seed: 0 or 1.
    """

    answers: int = 0
    same: int = 0


def findings(
    evidence: Evidence,
    *,
    eos_token_ids: Iterable[int],
    vocab_size: int | None,
    spelling: Spelling | None,
    earlier: Earlier | None,
) -> tuple[list[Finding], Metrics]:
    """Findings, and metrics: those of `structure.check` from `extra_tokens` on."""
    found, metrics = _canonical_findings(evidence, spelling)
    for more, numbers in (
        _hazard_findings(evidence, eos_token_ids, vocab_size, tags_of(spelling)),
        repeated_findings(evidence, earlier, vocab_size, tags_of(spelling)),
    ):
        found += more
        metrics |= numbers
    return found, metrics


def _canonical_findings(evidence: Evidence, spelling: Spelling | None) -> tuple[list[Finding], Metrics]:
    compared = None if spelling is None else _canonical.compare(evidence.output_ids, spelling)
    if compared is None:
        return [], {"extra_tokens": None, "noncanonical": None}
    metrics: Metrics = {"extra_tokens": compared.extra, "noncanonical": compared.spellings}
    level = _canonical.level(compared, evidence)
    if level is None or level > _canonical.REJECT_LEVEL:
        return [], metrics
    text = f"{compared.split} words in {compared.tokens} tokens are split finer than the tokenizer splits them"
    return [rejected("retokenised", text, level)], metrics


def _hazard_findings(
    evidence: Evidence, eos_token_ids: Iterable[int], vocab_size: int | None, tags: Tags
) -> tuple[list[Finding], Metrics]:
    found = hazard.from_claim(evidence, eos_token_ids, vocab_size, tags=tags)
    if found is None:
        return [], dict.fromkeys(("stopped", "hazard_low", "hazard_high", "too_long", "too_early"))
    metrics: Metrics = {
        "stopped": int(found.stopped),
        "hazard_low": found.low,
        "hazard_high": found.high,
        "too_long": found.too_long,
        "too_early": found.too_early,
    }
    # The levels are those of noise that nobody chose.
    if evidence.sampling.client_seed or found.level > hazard.REJECT_LEVEL:
        return [], metrics
    if found.too_long < found.too_early:
        text = "under the claim the answer would have stopped long before"
        return [rejected("went_on", text, found.level)], metrics
    return [rejected("stopped_early", "under the claim the answer would not have stopped here", found.level)], metrics


def repeated_findings(
    evidence: Evidence, earlier: Earlier | None, vocab_size: int | None, tags: Tags = UNKNOWN
) -> tuple[list[Finding], Metrics]:
    """An answer given before to the same prompt, by another seed.

    Null hypothesis: the answer was drawn anew from the law its claim states. It equals a given earlier one with that
    answer's probability, and one of m earlier ones that are no likelier than p with probability at most m·p. Answers
    with little entropy, and all at T = 0, repeat honestly; their level says so. Nothing is said where the client chose
    the seed.
    """
    if earlier is None:
        return [], {"repeats": None}
    metrics: Metrics = {"repeats": earlier.same}
    log_chance = hazard.drawn_again(evidence, vocab_size, tags=tags) if earlier.same else None
    # A client may choose two seeds that are one to the sampler: vLLM's V1 runner on a CPU takes the low 32 bits.
    if log_chance is None or evidence.sampling.client_seed:
        return [], metrics
    level = min(1.0, math.exp(log_chance) * max(1, earlier.answers))
    if level > REPEATED_LEVEL:
        return [], metrics
    text = "this very answer was given before, under another seed"
    return [rejected("repeated_answer", text, level)], metrics
