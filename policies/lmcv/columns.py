"""The columns LMCV writes per output token, from a claim and a replay.

LMCV's *worker* is our backend, its *verifier* our reference. Formulas: TrueOpen/lmcv-experiments, 2026. One
deliberate difference: rows follow the served token ids, not the rows a worker chose to hand over, so a row left out
stays in the count as missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from policies.evidence import MASKED, PAD_ID, TOP_LOGPROBS, Evidence, Replay
from policies.lmcv.divergence import MISSING_LOGPROB, Flags, Floats, Integers, members, overlap

CSV_COLUMNS = (
    "sample_id",
    "depth",
    "input_token_count",
    "output_token_count",
    "target_token_id",
    "target_decoded_token",
    "worker_trace_mode",
    "verifier_trace_mode",
    "worker_selected_logprob",
    "verifier_selected_logprob",
    "logprob_diff_verifier_minus_worker",
    "abs_logprob_diff",
    "worker_selected_rank",
    "verifier_selected_rank",
    "rank_delta_verifier_minus_worker",
    "common_top_count",
    "union_top_count",
    "topk_jaccard",
    "missing_from_verifier_count",
    "extra_in_verifier_count",
    "common_js_divergence",
    "union_js_divergence",
    "common_prob_cosine",
    "union_prob_cosine",
)
"""All 24, in LMCV's order, of `worker_vs_verifier_depth_metrics.csv`."""

INTEGER_COLUMNS = frozenset(
    name for name in CSV_COLUMNS if name.endswith(("_count", "_rank", "_id")) or name in {"depth", "rank_delta"}
) | {"rank_delta_verifier_minus_worker"}
"""Numeric columns written without a decimal point (`sample_id` is text all the same)."""


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """One side's lists of G positions.

    Attributes:
        ids, logprobs: (G, W), the emitted token first where it is known; −1 pads ids.
        selected: (G,), logprob of the emitted token; NaN where the side does not give one, −inf where it is zero.
        ranks: (G,), 1 is the most probable; NaN where unknown.
        beyond: (G,), the rank is only a lower bound, because the emitted token is outside the side's own top-k.
    """

    ids: Integers
    logprobs: Floats
    selected: Floats
    ranks: Floats
    beyond: Flags


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The numeric columns of any number of output tokens, float64 each; NaN is an empty field."""

    depth: Floats
    input_token_count: Floats
    output_token_count: Floats
    target_token_id: Floats
    worker_selected_logprob: Floats
    verifier_selected_logprob: Floats
    logprob_diff_verifier_minus_worker: Floats
    abs_logprob_diff: Floats
    worker_selected_rank: Floats
    verifier_selected_rank: Floats
    rank_delta_verifier_minus_worker: Floats
    common_top_count: Floats
    union_top_count: Floats
    topk_jaccard: Floats
    missing_from_verifier_count: Floats
    extra_in_verifier_count: Floats
    common_js_divergence: Floats
    union_js_divergence: Floats
    common_prob_cosine: Floats
    union_prob_cosine: Floats

    def __len__(self) -> int:
        return len(self.depth)

    def take(self, index: NDArray[np.generic]) -> Rows:
        """The rows of an index or mask."""
        return Rows(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


NUMERIC_COLUMNS = tuple(field.name for field in fields(Rows))


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Rows one after another; no parts give no rows."""
    empty = np.zeros(0)
    return Rows(
        **{name: np.concatenate([getattr(part, name) for part in parts] or [empty]) for name in NUMERIC_COLUMNS}
    )


def listing(
    output_ids: NDArray[np.integer],
    ids: NDArray[np.integer],
    logprobs: NDArray[np.floating],
    *,
    k: int | None = None,
) -> Listing:
    """One side's lists with ranks counted from the list itself: 1 + its logprobs above the emitted token's.

    OpenAI-style answers carry no ranks, and the place in the list is none either (the emitted token stands first).
    An emitted token below everything else that is listed has at least that rank. Rows that are absent, or that begin
    with another token than the one served, become empty.

    Args:
        output_ids: (G,), the served tokens.
        ids, logprobs: (H, W), emitted token first; −1 pads. H may differ from G.
        k: alternatives every list has for sure, so that ranks up to it are exact. None where the last may be missing,
            as in vLLM's chat answers: then a token below all others in its list has at least the rank counted.
    """
    count, width = len(output_ids), max(ids.shape[1], 1)
    own_ids = np.full((count, width), PAD_ID, np.int64)
    own_logprobs = np.full((count, width), -np.inf)
    rows = min(count, len(ids), len(logprobs))
    own_ids[:rows, : ids.shape[1]] = ids[:rows]
    own_logprobs[:rows, : ids.shape[1]] = logprobs[:rows]
    own_ids[own_ids[:, 0] != output_ids] = PAD_ID
    listed = members(own_ids)
    present = listed[:, 0]
    own_logprobs = np.where(own_logprobs <= MASKED, -np.inf, own_logprobs)
    selected = np.where(present, own_logprobs[:, 0], np.nan)
    others = listed[:, 1:]
    above = (others & (own_logprobs[:, 1:] > own_logprobs[:, :1])).sum(axis=1)
    ranks = np.where(present & ~np.isnan(selected), above + 1.0, np.nan)
    last = (above > 0) & (above == others.sum(axis=1))
    return Listing(own_ids, own_logprobs, selected, ranks, last if k is None else last & (ranks > k))


def rows(
    output_ids: NDArray[np.integer],
    worker: Listing,
    verifier: Listing,
    *,
    input_token_count: int,
    missing_logprob: float = MISSING_LOGPROB,
) -> Rows:
    """The columns of one sample, one row per served token.

    The rank difference is empty where either rank is unknown, or where both could be anything past the end of a list.
    """
    count = len(output_ids)
    pair = overlap(worker.ids, worker.logprobs, verifier.ids, verifier.logprobs, missing_logprob=missing_logprob)
    difference = _finite(verifier.selected - worker.selected)
    open_ended = (worker.beyond & (verifier.ranks >= worker.ranks)) | (
        verifier.beyond & (worker.ranks >= verifier.ranks)
    )
    return Rows(
        depth=np.arange(count, dtype=np.float64),
        input_token_count=np.full(count, float(input_token_count)),
        output_token_count=np.full(count, float(count)),
        target_token_id=output_ids.astype(np.float64),
        worker_selected_logprob=worker.selected,
        verifier_selected_logprob=verifier.selected,
        logprob_diff_verifier_minus_worker=difference,
        abs_logprob_diff=np.abs(difference),
        worker_selected_rank=worker.ranks,
        verifier_selected_rank=verifier.ranks,
        rank_delta_verifier_minus_worker=np.where(open_ended, np.nan, verifier.ranks - worker.ranks),
        common_top_count=pair.common,
        union_top_count=pair.union,
        topk_jaccard=np.where(pair.union > 0, pair.common / np.maximum(pair.union, 1.0), np.nan),
        missing_from_verifier_count=pair.missing,
        extra_in_verifier_count=pair.extra,
        common_js_divergence=pair.common_js,
        union_js_divergence=pair.union_js,
        common_prob_cosine=pair.common_cosine,
        union_prob_cosine=pair.union_cosine,
    )


_NEED_OWN_LIST = (
    "verifier_selected_rank",
    "rank_delta_verifier_minus_worker",
    "common_top_count",
    "union_top_count",
    "topk_jaccard",
    "missing_from_verifier_count",
    "extra_in_verifier_count",
    "union_js_divergence",
    "union_prob_cosine",
)


def compare(evidence: Evidence, replay: Replay, *, missing_logprob: float = MISSING_LOGPROB) -> Rows:
    """The columns of one generation. K is 20 on both sides; thresholds hold only for the K they were measured at.

    A replay of form `ids` has no list of its own: everything that needs one is empty.
    """
    own = slice(0, replay.own if replay.form == "full" else None)
    claimed = TOP_LOGPROBS if evidence.endpoint == "completions" else None
    found = rows(
        evidence.output_ids,
        listing(evidence.output_ids, evidence.claim_ids, evidence.claim_logprobs, k=claimed),
        listing(evidence.output_ids, replay.ids[:, own], replay.logprobs[:, own], k=TOP_LOGPROBS),
        input_token_count=len(evidence.prompt_ids),
        missing_logprob=missing_logprob,
    )
    if replay.form == "full":
        return found
    nothing = np.full(len(found), np.nan)
    kept = {name: nothing if name in _NEED_OWN_LIST else getattr(found, name) for name in NUMERIC_COLUMNS}
    return Rows(**kept)


def _finite(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, np.nan)
