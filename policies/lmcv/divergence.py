"""Two lists of logprobs side by side: overlap, Jensen–Shannon divergence and cosine, one value per position.

Formulas: LMCV (TrueOpen/lmcv-experiments, 2026). A list is a dictionary id → logprob; here it is a row of two arrays.
Shapes: G positions; W and X entries per row. Logprobs are nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.evidence import MASKED

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Integers = NDArray[np.int64]

MISSING_LOGPROB = -100.0
"""What an id gets on the side that does not list it."""
LN2 = float(np.log(2.0))

_BLOCK = 1 << 24
"""Pairs of entries compared at once, which bounds memory to tens of megabytes at any length."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """What two lists share, per position; float64 (G,).

    Attributes:
        common, union: ids on both sides; ids on either.
        missing, extra: ids only on the first side; ids only on the second.
        common_js, union_js: Jensen–Shannon divergence in nats, [0, ln 2], of both sides renormalised over the
            common ids or over the union (absent ids at `MISSING_LOGPROB`); NaN where there is nothing to renormalise.
        common_cosine, union_cosine: cosine of the same pairs of vectors.
    """

    common: Floats
    union: Floats
    missing: Floats
    extra: Floats
    common_js: Floats
    union_js: Floats
    common_cosine: Floats
    union_cosine: Floats


def members(ids: Integers) -> Flags:
    """Which entries count: not a pad (id < 0), and the first of its id in its row, as in a dictionary."""
    order = np.argsort(ids, axis=1, kind="stable")
    sorted_ids = np.take_along_axis(ids, order, axis=1)
    first = np.ones(ids.shape, np.bool_)
    first[:, 1:] = sorted_ids[:, 1:] != sorted_ids[:, :-1]
    unique = np.empty(ids.shape, np.bool_)
    np.put_along_axis(unique, order, first, axis=1)
    return unique & (ids >= 0)


def overlap(
    ids: Integers,
    logprobs: Floats,
    other_ids: Integers,
    other_logprobs: Floats,
    *,
    missing_logprob: float = MISSING_LOGPROB,
) -> Overlap:
    """Compares the lists of G positions; (G, W) against (G, X), −1 pads ids. Never raises on what a list holds."""
    step = max(1, _BLOCK // max(1, ids.shape[1] * other_ids.shape[1]))
    parts = [
        _overlap(ids[at:end], logprobs[at:end], other_ids[at:end], other_logprobs[at:end], missing_logprob)
        for at in range(0, max(len(ids), 1), step)
        for end in (at + step,)
    ]
    if len(parts) == 1:
        return parts[0]
    names = Overlap.__dataclass_fields__
    return Overlap(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _overlap(ids: Integers, logprobs: Floats, other_ids: Integers, other_logprobs: Floats, missing: float) -> Overlap:
    listed, other_listed = members(ids), members(other_ids)
    same = (ids[:, :, None] == other_ids[:, None, :]) & listed[:, :, None] & other_listed[:, None, :]
    shared, taken = same.any(axis=2), same.any(axis=1)
    counterpart = _take(_weightless(other_logprobs), same.argmax(axis=2) if same.shape[2] else None, shared, missing)
    own = _weightless(logprobs)
    extra = other_listed & ~taken
    first = np.concatenate([own, np.full(other_ids.shape, missing)], axis=1)
    second = np.concatenate([counterpart, _weightless(other_logprobs)], axis=1)
    everywhere = np.concatenate([listed, extra], axis=1)
    nowhere = np.zeros(other_ids.shape, np.bool_)
    p, q = _softmax(first, everywhere), _softmax(second, everywhere)
    in_both = np.concatenate([shared, nowhere], axis=1)
    p_common, q_common = _softmax(first, in_both), _softmax(second, in_both)
    return Overlap(
        common=shared.sum(axis=1).astype(np.float64),
        union=everywhere.sum(axis=1).astype(np.float64),
        missing=(listed & ~shared).sum(axis=1).astype(np.float64),
        extra=extra.sum(axis=1).astype(np.float64),
        common_js=js_divergence(p_common, q_common),
        union_js=js_divergence(p, q),
        common_cosine=_cosine(p_common, q_common),
        union_cosine=_cosine(p, q),
    )


def js_divergence(p: Floats, q: Floats) -> Floats:
    """Jensen–Shannon divergence of two distributions per row, (G, N), in nats; NaN where a row has a NaN."""
    middle = 0.5 * (p + q)
    divergence = 0.5 * (_kl(p, middle) + _kl(q, middle))
    empty = np.isnan(p).any(axis=1) | np.isnan(q).any(axis=1) | (p.shape[1] == 0)
    return np.where(empty, np.nan, np.clip(divergence, 0.0, LN2))


def _take(values: Floats, index: Integers | None, exists: Flags, otherwise: float) -> Floats:
    if index is None:
        return np.full(exists.shape, otherwise)
    return np.where(exists, np.take_along_axis(values, index, axis=1), otherwise)


def _weightless(logprobs: Floats) -> Floats:
    """−9999 is how vLLM writes −inf in JSON; a NaN has no weight either."""
    return np.where(np.isnan(logprobs) | (logprobs <= MASKED), -np.inf, logprobs)


def _softmax(logprobs: Floats, used: Flags) -> Floats:
    """Renormalised over the used entries, 0 elsewhere; NaN where the largest is not finite."""
    values = np.where(used, logprobs, -np.inf)
    largest = values.max(axis=1, keepdims=True, initial=-np.inf)
    finite = np.isfinite(largest)
    weights = np.exp(np.where(finite, values - np.where(finite, largest, 0.0), -np.inf))
    total = weights.sum(axis=1, keepdims=True)
    return np.where(finite, weights / np.where(total > 0, total, 1.0), np.nan)


def _kl(p: Floats, q: Floats) -> Floats:
    present = (p > 0) & (q > 0)
    ratio = np.where(present, p, 1.0) / np.where(present, q, 1.0)
    terms: Floats = np.where(present, p, 0.0) * np.log(ratio)
    return np.asarray(terms.sum(axis=1), np.float64)


def _cosine(p: Floats, q: Floats) -> Floats:
    norms = np.sqrt((p * p).sum(axis=1) * (q * q).sum(axis=1))
    dot = (p * q).sum(axis=1)
    return np.where(norms > 0, np.minimum(dot / np.where(norms > 0, norms, 1.0), 1.0), np.nan)
