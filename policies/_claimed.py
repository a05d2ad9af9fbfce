"""The structure check's rules on claimed logprobs, over all tokens at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies import _grammar
from policies._findings import Finding, rejected, undecided, withheld
from policies.evidence import MASKED, PAD_ID, TOP_LOGPROBS, Evidence, Ids, Sampling

POSITIVE_ROUNDING = 1e-4
"""Nats above 0 that rounding explains."""
MASS_ROUNDING = 1e-2
"""Distance of Σp from 1 that a bf16 head explains, above, and below where entries are masked. Of 1,328 masked rows of
real servers (vLLM 0.32, CPU and H200) none was off by more than 2e-7."""
ORDER_ROUNDING = 1e-6
"""Nats by which a listed alternative may exceed the one before it."""


def claim_findings(
    evidence: Evidence, vocab_size: int | None, stops: frozenset[int] | None
) -> tuple[list[Finding], float | None]:
    """Broken rules, and the largest excess of a position's listed probability over 1 (None without a claim).

    `stops` are all ids that end this answer, None where they are not known.
    """
    ids, logprobs, output = evidence.claim_ids, evidence.claim_logprobs, evidence.output_ids
    if ids.ndim != 2 or ids.shape != logprobs.shape:
        return [withheld("bad_logprobs", "claimed ids and logprobs differ in shape")], None
    if not ids.size:
        return ([withheld("no_logprobs", "tokens came without logprobs")] if len(output) else []), None
    rows = min(len(ids), len(output))
    findings = []
    if len(ids) < len(output):
        findings.append(withheld("no_logprobs", f"{len(output) - len(ids)} tokens came without logprobs"))
    if len(ids) > len(output):
        findings.append(withheld("bad_ids", f"{len(ids) - len(output)} logprobs belong to no token"))

    listed = ids != PAD_ID
    values = logprobs.astype(np.float64)
    masked = listed & (values <= MASKED) & np.isfinite(values)
    finite = listed & np.isfinite(values)
    if bool((~listed[:, 0]).any()):
        findings.append(withheld("bad_logprobs", "a token's own logprob is missing"))
    elif bool((ids[:rows, 0] != output[:rows]).any()):
        findings.append(withheld("bad_ids", "a claim is for another token than the one in the answer"))
    if bool((listed & ~np.isfinite(values)).any()) or bool((~listed & (values != -np.inf)).any()):
        findings.append(withheld("bad_logprobs", "a logprob is not finite, or belongs to no id"))
    if bool((ids < PAD_ID).any()) or (vocab_size is not None and bool((ids >= vocab_size).any())):
        findings.append(withheld("bad_ids", "a claimed id is outside the vocabulary"))
    if bool(masked.any()):
        if _grammar.unasked(evidence):
            text = "entries are masked (−9999): the server's own grammar for tools, which `models` does not declare?"
            findings.append(undecided("masked_by_server", text))
        elif not evidence.sampling.grammar:
            text = "entries are masked (−9999), yet no grammar was asked for"
            findings.append(withheld("masked_without_grammar", text))
        elif bool(masked[:, 0].any()):
            text = "a token is masked (−9999) and was sampled all the same"
            blank = _maybe_blank(evidence.sampling, ids, listed & ~masked, stops)
            findings.append((undecided if blank[masked[:, 0]].all() else withheld)("sampled_masked", text))

    expected = TOP_LOGPROBS if vocab_size is None else min(TOP_LOGPROBS, vocab_size)
    if bool((listed.sum(axis=1) < expected)[listed[:, 0]].any()):
        findings.append(withheld("short_claim", f"fewer than {expected} logprobs came for a token"))
    ordered = np.sort(np.where(listed, ids, np.arange(-ids.shape[1], 0) - 1), axis=1)
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        findings.append(withheld("duplicate_entries", "an id is listed twice for one token"))
    alternatives = np.where(finite, values, -np.inf)[:, 1:]
    if bool((alternatives[:, 1:] > alternatives[:, :-1] + ORDER_ROUNDING).any()):
        findings.append(withheld("unsorted_claim", "the alternatives of a token are not sorted"))

    allowed = np.exp(np.where(finite & ~masked, np.minimum(values, 1.0), -np.inf)).sum(axis=1)
    by_grammar = masked.any(axis=1) & ~masked[:, 0] & (evidence.sampling.grammar or _grammar.unasked(evidence))
    if bool((by_grammar & (allowed < 1.0 - MASS_ROUNDING)).any()):
        # Masked entries fill a list that has room for more than is allowed: all that is allowed stands before them.
        text = "beside masked entries, a token's listed probabilities do not add up to 1"
        findings.append(rejected("masked_mass", text))
    capped = np.where(finite, np.minimum(values, 1.0), -np.inf)
    if bool((np.where(finite, values, 0.0) > POSITIVE_ROUNDING).any()):
        findings.append(rejected("positive_logprob", "a probability is over 1"))
    excess = float(np.exp(capped).sum(axis=1).max() - 1.0)
    if excess > MASS_ROUNDING:
        findings.append(rejected("mass_over_one", f"a token's listed probabilities add up to {1.0 + excess:.4g}"))
    return findings, excess


def _maybe_blank(
    sampling: Sampling, ids: Ids, unmasked: NDArray[np.bool_], stops: frozenset[int] | None
) -> NDArray[np.bool_]:
    """Rows in which the request's other masks may forbid whatever the grammar allows; there vLLM emits what it likes.

    A row with a masked entry lists all that its grammar allows.
    """
    blank = np.full(len(ids), bool(sampling.bad_words))
    going_on = np.zeros(len(ids), bool) if stops is None else (unmasked & ~np.isin(ids, list(stops))).any(axis=1)
    blank |= ~going_on & (np.arange(len(ids)) < sampling.min_tokens)
    if sampling.allowed_token_ids:
        blank |= ~(unmasked & np.isin(ids, list(sampling.allowed_token_ids))).any(axis=1)
    return blank
