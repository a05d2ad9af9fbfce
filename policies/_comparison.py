"""A claim and a replay of the same tokens, set side by side, one value per position.

Shapes: G positions; W and X entries per row of claim and replay. Logprobs are nats. `difference`, `rank_changed`,
`jaccard` and `js` are LMCV's (TrueOpen/lmcv-experiments, 2026); they and `omitted` know only the reference's own list
(`Replay.own`). Everything else uses whatever claimed id the replay scores.
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
SHIFT_WEIGHT = 0.1
"""Weight in `apart` of the square of the difference that all ids of a position share, which is mostly the
normaliser's and so the noisiest part of it. Without any, a claim moved as a whole would not be seen; a weight of 1
costs a quarter of the separation (SmolLM2, CPU, 16 tokens: 13.8 honest standard deviations for FP8-rounded weights
at 0.1, 11.0 at 1)."""

_TINY = 1e-300

_Floats = NDArray[np.float64]
_Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything per position; NaN where it does not exist.

    Attributes:
        difference: |replayed − claimed| of the emitted token.
        rank_changed: the emitted token's rank differs; 1.0, 0.0 or NaN.
        jaccard: |claimed ∩ own| / |claimed ∪ own| over listed ids, the emitted one among them.
        js: Jensen–Shannon divergence over the union, each side renormalised over it, in [0, ln 2].
        spread: mean over the ids both sides list of |replayed − claimed|, each capped at `SPIKE`.
        apart: root mean square difference over the union of both lists, once the mean over shared ids is taken out
            (it returns with weight `SHIFT_WEIGHT`), each capped at `SPIKE`. Of an id that only one side lists, the
            least it must differ by: the other side puts it no higher than the last entry of its list. In form `ids`
            only shared ids exist.
        omitted: reference probability of its own listed ids that the claim leaves out.
        claimed: reference probability of the claimed ids (a lower bound where the replay lists its own ids).
        unmatched: claimed ids that the replay has no logprob of.
        changed: the two sides differ by more than rounding, or the claim leaves out an id that the reference
            puts above the least one claimed. Not where the claim has no number for its own token: that evidence is
            missing, which is no distance.
    """

    difference: _Floats
    rank_changed: _Floats
    jaccard: _Floats
    js: _Floats
    spread: _Floats
    apart: _Floats
    omitted: _Floats
    claimed: _Floats
    unmatched: NDArray[np.int64]
    changed: _Flags


def compare(evidence: Evidence, replay: Replay) -> Comparison:
    """Compares the rows both sides have. Never raises on what a claim holds."""
    rows = min(len(evidence.output_ids), len(evidence.claim_ids), len(replay.ids))
    ids, claim, listed = usable(evidence.claim_ids[:rows], evidence.claim_logprobs[:rows])
    other_ids, reference, other_listed = usable(replay.ids[:rows], replay.logprobs[:rows])
    width = max(replay.own, 1) if replay.own is not None and replay.form == "full" else None
    own, own_listed = reference[:, :width], other_listed[:, :width]

    at = found(ids, listed, other_ids, other_listed)
    shared = at >= 0
    replayed = np.where(shared, np.take_along_axis(reference, np.maximum(at, 0), axis=1), -np.inf)
    in_own = shared & (at < own.shape[1])
    left_out = own_listed.copy()
    row, column = np.nonzero(in_own)
    left_out[row, at[row, column]] = False
    only_reference = np.where(left_out, own, -np.inf)
    common = in_own.sum(axis=1)
    union = listed.sum(axis=1) + own_listed.sum(axis=1) - common

    delta = np.zeros(claim.shape)
    np.subtract(replayed, claim, out=delta, where=shared)
    gaps = np.abs(delta)
    matched = shared.sum(axis=1)
    both_emitted = listed[:, 0] & other_listed[:, 0] & (ids[:, 0] == other_ids[:, 0])
    least = least_listed(claim, listed)
    outside = only_reference.max(axis=1, initial=-np.inf) > least + RESOLUTION
    missing = np.where(np.isfinite(only_reference), MISSING_LOGPROB, -np.inf)
    own_of_claim = np.where(in_own, replayed, np.where(listed, MISSING_LOGPROB, -np.inf))
    only_claim = np.where(listed & ~shared & (replay.form == "full"), claim, -np.inf)
    return Comparison(
        difference=_where(both_emitted, np.abs(finite(reference[:, 0]) - finite(claim[:, 0]))),
        rank_changed=_where(both_emitted, _rank_changed(claim, listed, own, own_listed)),
        jaccard=_where(union > 0, common / np.maximum(union, 1)),
        js=_js(np.concatenate([claim, missing], axis=1), np.concatenate([own_of_claim, only_reference], axis=1)),
        spread=_where(matched > 0, np.minimum(gaps, SPIKE).sum(axis=1) / np.maximum(matched, 1)),
        apart=_apart(
            delta, matched, only_claim - least_listed(own, own_listed)[:, None], only_reference - least[:, None]
        ),
        omitted=np.exp(np.minimum(only_reference, 0.0)).sum(axis=1),
        claimed=np.exp(np.minimum(replayed, 0.0)).sum(axis=1),
        unmatched=(listed & ~shared).sum(axis=1),
        changed=listed[:, 0] & ((gaps.max(axis=1, initial=0.0) > RESOLUTION) | outside | ~both_emitted),
    )


def usable(ids: Ids, logprobs: Logprobs) -> tuple[Ids, _Floats, _Flags]:
    """Ids; logprobs as float64, −inf wherever an entry is a pad, masked or not finite; which entries are left."""
    if not ids.shape[1]:
        ids, logprobs = np.full((len(ids), 1), PAD_ID, np.int32), np.full((len(ids), 1), -np.inf, np.float32)
    values = logprobs.astype(np.float64)
    listed = (ids >= 0) & np.isfinite(values) & (values > MASKED)
    return ids, np.where(listed, values, -np.inf), listed


def found(ids: Ids, listed: _Flags, other_ids: Ids, other_listed: _Flags) -> NDArray[np.intp]:
    """In which column of the other side each id stands, (G, W); −1 where it does not."""
    sought, known = np.where(listed, ids, -1), np.where(other_listed, other_ids, -2)
    at = (sought[:, :, None] == known[:, None, :]).argmax(axis=2)
    return np.where(np.take_along_axis(known, at, axis=1) == sought, at, -1)


def least_listed(values: _Floats, listed: _Flags) -> _Floats:
    """Least logprob among the listed alternatives, (G,); inf where there is none."""
    least: _Floats = np.where(listed, values, np.inf)[:, 1:].min(axis=1, initial=np.inf)
    return least


def finite(values: _Floats) -> _Floats:
    """0 for what is no number."""
    return np.where(np.isfinite(values), values, 0.0)


def _apart(delta: _Floats, matched: NDArray[np.int64], over_reference: _Floats, over_claim: _Floats) -> _Floats:
    """See `Comparison.apart`.

    Args:
        delta: replayed − claimed, 0 where not shared; `matched` of a row are shared.
        over_reference: claimed logprobs of ids that only the claim lists, above the reference's last; or −inf.
        over_claim: the same for ids that only the reference lists.
    """
    shift = (delta.sum(axis=1) / np.maximum(matched, 1))[:, None]
    residue = np.minimum(np.abs(delta - shift), SPIKE) ** 2
    # What is not shared holds a delta of 0, which lies |shift| from the mean.
    total = residue.sum(axis=1) - (delta.shape[1] - matched) * np.minimum(np.abs(shift[:, 0]), SPIKE) ** 2
    total += (np.clip(over_claim - shift, 0.0, SPIKE) ** 2).sum(axis=1)
    total += (np.clip(over_reference + shift, 0.0, SPIKE) ** 2).sum(axis=1)
    count = matched + np.isfinite(over_claim).sum(axis=1) + np.isfinite(over_reference).sum(axis=1)
    mean = np.maximum(total, 0.0) / np.maximum(count, 1)
    return _where(count > 0, np.sqrt(mean + SHIFT_WEIGHT * np.minimum(np.abs(shift[:, 0]), SPIKE) ** 2))


def _rank_changed(claim: _Floats, listed: _Flags, reference: _Floats, other_listed: _Flags) -> _Floats:
    """Rank = 1 + listed logprobs above the emitted one, cut at the shorter list's length + 1.

    vLLM's chat answers lose the twentieth alternative when the sampled token is not among the top twenty, so the
    two sides may list different numbers of others; ranks beyond the shorter list are one and the same.
    """
    depth = np.minimum(listed[:, 1:].sum(axis=1), other_listed[:, 1:].sum(axis=1))
    rank = np.minimum((claim[:, 1:] > claim[:, :1]).sum(axis=1), depth)
    above = other_listed[:, 1:] & (reference[:, 1:] > reference[:, :1])
    changed: _Floats = np.asarray(rank != np.minimum(above.sum(axis=1), depth), np.float64)
    return changed


def _js(first: _Floats, second: _Floats) -> _Floats:
    """Entropy of the middle less the mean entropy of both."""
    p, q = _softmax(first), _softmax(second)
    terms = _plogp(p) + _plogp(q) - 2.0 * _plogp(0.5 * (p + q))
    divergence: _Floats = np.maximum(0.5 * terms.sum(axis=1), 0.0)
    return divergence


def _plogp(p: _Floats) -> _Floats:
    product: _Floats = p * np.log(np.maximum(p, _TINY))
    return product


def _softmax(values: _Floats) -> _Floats:
    largest = values.max(axis=1, keepdims=True, initial=-np.inf)
    weights = np.exp(values - np.where(np.isfinite(largest), largest, 0.0))
    total = weights.sum(axis=1, keepdims=True)
    return np.where(total > 0, weights / np.where(total > 0, total, 1.0), np.nan)


def _where(exists: _Flags, values: _Floats) -> _Floats:
    return np.where(exists, values, np.nan)
