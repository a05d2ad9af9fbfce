"""Expert ids kept beside the evidence, and how they compare with the replay's, in the columns LMCV names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.lmcv.files import Row
from policies.errors import ReplayError
from policies.lmcv import moe
from verifier_pool.reference.experts import decode_npy

COLUMNS = (
    "sample_id",
    "category",
    "source_model",
    "verifier_model",
    "selected_layers",
    "input_token_count",
    "output_token_count",
    "compared_tokens",
    "compared_entries",
    "entry_match_count",
    "entry_match_rate",
    "entry_mismatch_count",
    "entry_mismatch_rate",
    "token_count",
    "token_layer_match_count",
    "token_layer_match_rate",
    "token_layer_set_match_count",
    "token_layer_set_match_rate",
    "token_match_count",
    "token_match_rate",
    "topk_jaccard_mean",
    "topk_jaccard_sum",
    "topk_overlap_mean",
    "topk_overlap_sum",
    "gen_shape",
    "prefill_shape",
    "expected_gen_len",
    "expected_prefill_len",
    "shape_status",
    "status",
    "comparison_kind",
)
"""Of `route_diff_by_sample.csv`."""
FIELDS = ("routed_experts", "prompt_routed_experts")

Routes = NDArray[np.integer]


def kept(choice: Mapping[str, Any], answer: Mapping[str, Any]) -> Row:
    """Fields of an evidence row: the expert ids as the server sent them, and their shape."""
    raw = next((source[name] for source in (choice, answer) for name in FIELDS if source.get(name) is not None), None)
    return {"routed_experts": raw, "routed_experts_summary": summary(decode(raw)), "route_prompt_start": 0}


def decode(value: Any) -> Routes | None:
    """Expert ids (tokens, layers, slots) from any form LMCV's tools read, or None when there are none to read.

    Base64 of a `.npy` file, a nested list, or an object that holds one of them. Arrays of rank 1 and 2 are one slot,
    and one layer.
    """
    if isinstance(value, dict):
        inner = next((value[name] for name in ("data", "array", *FIELDS) if value.get(name) is not None), None)
        return decode(inner) if not isinstance(inner, dict) else None
    try:
        array = decode_npy(value) if isinstance(value, str) else np.array(value if value is not None else [])
    except (ReplayError, ValueError, OverflowError):
        return None
    if not array.size or not np.issubdtype(array.dtype, np.integer) or not 1 <= array.ndim <= 3:
        return None
    shape = {1: (-1, 1, 1), 2: (len(array), 1, -1)}.get(array.ndim, array.shape)
    return array.astype(np.int64).reshape(shape)


def summary(routes: Routes | None) -> Row:
    """`routed_experts_summary`."""
    if routes is None:
        return {"present": False, "shape": None, "dtype": None, "num_entries": 0, "min": None, "max": None}
    edges = {"min": int(routes.min()), "max": int(routes.max())}
    return {"present": True, "shape": routes.shape, "dtype": str(routes.dtype), "num_entries": routes.size} | edges


def compare(
    row: Row,
    verifier: Any,
    *,
    verifier_model: str,
    prompt: int,
    output: int,
    layers: Sequence[int] = (0,),
    sentinel: int | None = moe.SENTINEL,
) -> Row:
    """One record of `route_diff_by_sample.csv`.

    The last output token was never fed forward at the worker, so decoding covers positions [0, P+G−1); a prefill
    covers [0, P+G), or [P, P+G) where asked for that. They share the G−1 positions from P on.

    Args:
        row: the evidence row with `routed_experts`.
        verifier: the replay's, as it came.
    """
    ours, theirs = decode(row.get("routed_experts")), decode(verifier)
    model = row.get("worker_variant")
    base: Row = {
        "sample_id": row["sample_id"],
        "category": row.get("category"),
        "source_model": model.get("model") if isinstance(model, dict) else None,
        "verifier_model": verifier_model,
        "selected_layers": ",".join(map(str, layers)),
        "input_token_count": prompt,
        "output_token_count": output,
        "gen_shape": list(ours.shape) if ours is not None else None,
        "prefill_shape": list(theirs.shape) if theirs is not None else None,
        "expected_gen_len": prompt + output - 1,
        "expected_prefill_len": output,
        "comparison_kind": "decode_vs_prefill",
    }
    if ours is None or theirs is None:
        return base | {"status": "missing_routes"}
    gen, prefill = _window(ours, prompt, prompt + output - 1), _window(theirs, prompt, prompt + output)
    if prefill is None:
        prefill = _window(theirs, prompt, prompt + output - 1)
    if gen is None or prefill is None:
        return base | {"status": "empty_common_window", "shape_status": "expected_length_mismatch"}
    count = output - 1
    if gen.shape[1:] != prefill.shape[1:]:
        return base | {"status": "empty_common_window", "shape_status": "layer_topk_shape_mismatch"}
    chosen = [layer for layer in layers if 0 <= layer < gen.shape[1]]
    if not chosen:
        return base | {"status": "no_selected_layers"}
    if count < 1:
        return base | {"status": "empty_common_window", "shape_status": "ok"}
    found = moe.compare_routes(gen[:count, chosen], prefill[:count, chosen], sentinel=sentinel)
    return base | _record(found) | {"shape_status": "ok", "status": "ok" if found.entries else "empty_common_window"}


def decisions(records: Sequence[Row], *, illegal: int = 0, uncertain: int = 0) -> Row:
    """`route_diff_summary.json`: LMCV's rule over all samples and over random sets of five, under each threshold."""
    good = [record for record in records if record.get("status") == "ok"]
    entries, wrong, tokens = (
        np.array([int(record[name]) for record in good], np.int64)
        for name in ("compared_entries", "entry_mismatch_count", "compared_tokens")
    )
    layers = {str(record.get("selected_layers")) for record in good}
    found: Row = {
        "samples": len(records),
        "compared_samples": len(good),
        "compared_tokens": int(tokens.sum()),
        "weighted_entry_mismatch_rate": moe.weighted_mismatch(entries, wrong),
        "selected_layers": sorted(layers),
    }
    if layers - {"0"}:
        return found | {"note": "the rule is for layer 0 alone"}
    limits = {**moe.THRESHOLDS, "fp8_lenient": moe.LENIENT_FP8}
    for name, limit in limits.items():
        decision = moe.decide(entries, wrong, tokens, limit, illegal=illegal, uncertain=uncertain)
        found[name] = {"threshold": limit, "decision": decision}
        if len(good) >= moe.SAMPLES:
            found[name]["random_5"] = moe.acceptance_rate(entries, wrong, tokens, limit)
    return found


def _window(routes: Routes, prompt: int, end: int) -> Routes | None:
    """Rows from position `prompt` on; the array covers [0, end) or [prompt, end)."""
    if len(routes) == end:
        return routes[prompt:]
    return routes if len(routes) == end - prompt else None


def _record(found: moe.RouteCounts) -> Row:
    pairs = found.token_layers

    def rate(part: float, whole: int) -> float:
        return part / whole if whole else math.nan

    return {
        "compared_tokens": found.tokens,
        "compared_entries": found.entries,
        "entry_match_count": found.entries - found.entry_mismatches,
        "entry_match_rate": rate(found.entries - found.entry_mismatches, found.entries),
        "entry_mismatch_count": found.entry_mismatches,
        "entry_mismatch_rate": rate(found.entry_mismatches, found.entries),
        "token_count": found.tokens,
        "token_layer_match_count": found.token_layer_matches,
        "token_layer_match_rate": rate(found.token_layer_matches, pairs),
        "token_layer_set_match_count": found.token_layer_set_matches,
        "token_layer_set_match_rate": rate(found.token_layer_set_matches, pairs),
        "token_match_count": found.token_matches,
        "token_match_rate": rate(found.token_matches, found.tokens),
        "topk_jaccard_mean": rate(found.jaccard_sum, pairs),
        "topk_jaccard_sum": found.jaccard_sum,
        "topk_overlap_mean": rate(found.overlap_sum, pairs),
        "topk_overlap_sum": found.overlap_sum,
    }
