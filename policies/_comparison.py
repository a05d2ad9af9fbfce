"""A claim and a replay of the same tokens, set side by side, one value per position.

Shapes: G positions; W and X entries per row of claim and replay. Logprobs are nats. Formulas: LMCV
(TrueOpen/lmcv-experiments, 2026).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.evidence import MASKED, PAD_ID, Evidence, Ids, Logprobs, Replay

MISSING_LOGPROB = -100.0
"""Stands in for an id that one side does not list."""
SPIKE = 1.0
"""Nats above which one difference counts no further, so that no single token decides. Honest mixture-of-experts
models flip routes and jump by tens of nats on isolated tokens; LMCV calls anything over 1 a spike."""
RESOLUTION = 1e-6
"""Nats below which two logprobs are the same number."""

_Floats = NDArray[np.float64]
_Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything per position; NaN where it does not exist.

    Attributes:
        difference: |replayed − claimed| of the emitted token.
        rank_changed: the emitted token's rank differs; 1.0, 0.0 or NaN.
        jaccard: |claimed ∩ replayed| / |claimed ∪ replayed| over listed ids, the emitted one among them.
        js: Jensen–Shannon divergence over the union, each side renormalised over it, in [0, ln 2].
        spread: mean over the ids both sides list of |replayed − claimed|, each capped at `SPIKE`.
        omitted: reference probability of its own listed ids that the claim leaves out.
        claimed: reference probability of the claimed ids (a lower bound where the replay lists its own ids).
        changed: the two sides differ by more than rounding, or the claim leaves out an id that the reference
            puts above the least one claimed. Not where the claim has no number for its own token: that evidence is
            missing, which is no distance.
    """

    difference: _Floats
    rank_changed: _Floats
    jaccard: _Floats
    js: _Floats
    spread: _Floats
    omitted: _Floats
    claimed: _Floats
    changed: _Flags


def compare(evidence: Evidence, replay: Replay) -> Comparison:
    """Compares the rows both sides have. Never raises on what a claim holds."""
    rows = min(len(evidence.output_ids), len(evidence.claim_ids), len(replay.ids))
    ids, claim, listed = _usable(evidence.claim_ids[:rows], evidence.claim_logprobs[:rows])
    other_ids, reference, other_listed = _usable(replay.ids[:rows], replay.logprobs[:rows])
    same = (ids[:, :, None] == other_ids[:, None, :]) & listed[:, :, None] & other_listed[:, None, :]
    shared, in_claim = same.any(axis=2), same.any(axis=1)
    reference_of_claim = np.where(
        shared, np.take_along_axis(reference, same.argmax(axis=2), axis=1), np.where(listed, MISSING_LOGPROB, -np.inf)
    )
    only_reference = np.where(other_listed & ~in_claim, reference, -np.inf)
    common = shared.sum(axis=1)
    union = listed.sum(axis=1) + other_listed.sum(axis=1) - common

    both_emitted = listed[:, 0] & other_listed[:, 0] & (ids[:, 0] == other_ids[:, 0])
    difference = _where(both_emitted, np.abs(_finite(reference[:, 0]) - _finite(claim[:, 0])))
    gaps = np.where(shared, np.abs(_finite(reference_of_claim) - _finite(claim)), 0.0)
    missing = np.where(np.isfinite(only_reference), MISSING_LOGPROB, -np.inf)
    least = np.where(listed, claim, np.inf)[:, 1:].min(axis=1, initial=np.inf)
    left_out = only_reference.max(axis=1, initial=-np.inf) > least + RESOLUTION
    return Comparison(
        difference=difference,
        rank_changed=_where(both_emitted, _rank_changed(claim, listed, reference, other_listed)),
        jaccard=_where(union > 0, common / np.maximum(union, 1)),
        js=_js(np.concatenate([claim, missing], axis=1), np.concatenate([reference_of_claim, only_reference], axis=1)),
        spread=_where(common > 0, np.minimum(gaps, SPIKE).sum(axis=1) / np.maximum(common, 1)),
        omitted=np.exp(np.minimum(only_reference, 0.0)).sum(axis=1),
        claimed=np.exp(np.minimum(np.where(shared, reference_of_claim, -np.inf), 0.0)).sum(axis=1),
        changed=listed[:, 0] & ((gaps.max(axis=1, initial=0.0) > RESOLUTION) | left_out | ~both_emitted),
    )


def _usable(ids: Ids, logprobs: Logprobs) -> tuple[Ids, _Floats, _Flags]:
    """Ids; logprobs as float64, −inf wherever an entry is a pad, masked or not finite; which entries are left."""
    if not ids.shape[1]:
        ids, logprobs = np.full((len(ids), 1), PAD_ID, np.int32), np.full((len(ids), 1), -np.inf, np.float32)
    values = logprobs.astype(np.float64)
    listed = (ids >= 0) & np.isfinite(values) & (values > MASKED)
    return ids, np.where(listed, values, -np.inf), listed


def _rank_changed(claim: _Floats, listed: _Flags, reference: _Floats, other_listed: _Flags) -> _Floats:
    """Rank = 1 + listed logprobs above the emitted one, cut at the shorter list's length + 1.

    vLLM's chat answers lose the twentieth alternative when the sampled token is not among the top twenty, so the
    two sides may list different numbers of others; ranks beyond the shorter list are one and the same.
    """
    depth = np.minimum(listed[:, 1:].sum(axis=1), other_listed[:, 1:].sum(axis=1))
    rank = np.minimum((claim[:, 1:] > claim[:, :1]).sum(axis=1), depth)
    other_rank = np.minimum((reference[:, 1:] > reference[:, :1]).sum(axis=1), depth)
    changed: _Floats = np.asarray(rank != other_rank, np.float64)
    return changed


def _js(first: _Floats, second: _Floats) -> _Floats:
    if not first.size:
        return np.full(len(first), np.nan)
    p, q = _softmax(first), _softmax(second)
    middle = 0.5 * (p + q)
    divergence = 0.5 * (_kl(p, middle) + _kl(q, middle))
    return np.maximum(divergence, 0.0)


def _softmax(values: _Floats) -> _Floats:
    largest = values.max(axis=1, keepdims=True)
    weights = np.exp(values - np.where(np.isfinite(largest), largest, 0.0))
    total = weights.sum(axis=1, keepdims=True)
    return np.where(total > 0, weights / np.where(total > 0, total, 1.0), np.nan)


def _kl(p: _Floats, q: _Floats) -> _Floats:
    present = p > 0
    terms = np.where(present, p, 0.0) * np.log(np.where(present, p, 1.0) / np.where(present, q, 1.0))
    return np.where(np.isnan(p).any(axis=1), np.nan, terms.sum(axis=1))


def _finite(values: _Floats) -> _Floats:
    return np.where(np.isfinite(values), values, 0.0)


def _where(exists: _Flags, values: _Floats) -> _Floats:
    return np.where(exists, values, np.nan)
