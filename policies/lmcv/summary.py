"""Summaries of LMCV's columns: what its rules are applied to, and the buckets its reports are cut by.

Means and quantiles run over finite values only; `count` and the `missing_…` counts keep the rest in sight. Quantiles
interpolate linearly at (n − 1)q; of nothing they are NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from policies.lmcv.columns import Rows
from policies.lmcv.divergence import Floats

Metrics = dict[str, float]
Labels = NDArray[np.str_]

DISTRIBUTION_COLUMNS = (
    "abs_logprob_diff_p50",
    "abs_logprob_diff_p90",
    "abs_logprob_diff_p95",
    "abs_logprob_diff_p99",
    "abs_logprob_diff_p999",
    "count",
    "finite_count",
    "group",
    "max_abs_logprob_diff",
    "mean_abs_logprob_diff",
    "missing_selected_count",
    "rank_delta_nonzero_rate",
    "topk_jaccard_mean",
    "topk_jaccard_p01",
    "topk_jaccard_p05",
    "union_js_max",
    "union_js_p95",
    "union_js_p99",
)
"""Of `distribution/*.csv`, in LMCV's (alphabetical) order."""

COUNTS = frozenset(
    {"count", "finite_count", "missing_selected_count", "missing_compared_count", "missing_evidence_count"}
)

_INPUT_EDGES = (
    (128, "00000-00128"),
    (512, "00129-00512"),
    (2048, "00513-02048"),
    (8192, "02049-08192"),
    (16384, "08193-16384"),
)
_DEPTH_EDGES = ((16, "000-016"), (32, "017-032"), (64, "033-064"), (128, "065-128"), (256, "129-256"))


def summarise(rows: Rows) -> Metrics:
    """Every metric of a set of rows, logprobs in nats.

    `missing_selected_count`: rows without a verifier logprob. vLLM always gives one for a prompt token, so this alone
    never sees a wrong token; `legality` does. `missing_evidence_count`: rows without a worker logprob, the worker's
    own omission. `missing_compared_count`: rows where the difference does not exist or is not finite.
    """
    difference = _finite(rows.abs_logprob_diff)
    ranks = _finite(rows.rank_delta_verifier_minus_worker)
    jaccard, js = _finite(rows.topk_jaccard), _finite(rows.union_js_divergence)
    p50, p90, p95, p99, p999 = quantiles(difference, (0.5, 0.9, 0.95, 0.99, 0.999))
    jaccard_low, jaccard_p05 = quantiles(jaccard, (0.01, 0.05))
    js_p95, js_p99 = quantiles(js, (0.95, 0.99))
    return {
        "count": float(len(rows)),
        "finite_count": float(len(difference)),
        "missing_selected_count": float(np.isnan(rows.verifier_selected_logprob).sum()),
        "missing_evidence_count": float(np.isnan(rows.worker_selected_logprob).sum()),
        "missing_compared_count": float(len(rows) - len(difference)),
        "mean_abs_logprob_diff": mean(difference),
        "max_abs_logprob_diff": float(difference.max()) if len(difference) else np.nan,
        "abs_logprob_diff_p50": p50,
        "abs_logprob_diff_p90": p90,
        "abs_logprob_diff_p95": p95,
        "abs_logprob_diff_p99": p99,
        "abs_logprob_diff_p999": p999,
        "rank_delta_nonzero_rate": mean((ranks != 0).astype(np.float64)),
        "topk_jaccard_mean": mean(jaccard),
        "topk_jaccard_min": float(jaccard.min()) if len(jaccard) else np.nan,
        "topk_jaccard_p01": jaccard_low,
        "topk_jaccard_p05": jaccard_p05,
        "union_js_p95": js_p95,
        "union_js_p99": js_p99,
        "union_js_max": float(js.max()) if len(js) else np.nan,
    }


def grouped(rows: Rows, labels: Labels) -> dict[str, Metrics]:
    """One summary per label, labels in order."""
    names, inverse = np.unique(labels, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    ends = np.searchsorted(inverse[order], np.arange(len(names) + 1))
    return {
        str(name): summarise(rows.take(order[start:end]))
        for name, start, end in zip(names, ends[:-1], ends[1:], strict=True)
    }


def input_buckets(input_token_count: Floats) -> Labels:
    """LMCV's label of each row's prompt length."""
    return _buckets(input_token_count, _INPUT_EDGES, "16385+")


def depth_buckets(depth: Floats) -> Labels:
    """LMCV's label of each row's place in the answer. `depth` counts from 0, the labels from 1."""
    return _buckets(depth + 1, _DEPTH_EDGES, "257+")


def fixed_point(metrics: Mapping[str, float]) -> dict[str, int | None]:
    """`NAME_fp_1e6` = round(x · 10⁶), the integer form meant for hashing and signing; None where not finite."""
    return {f"{name}_fp_1e6": round(value * 1e6) if np.isfinite(value) else None for name, value in metrics.items()}


def quantiles(values: Floats, levels: tuple[float, ...]) -> list[float]:
    """Linear interpolation at (n − 1)q; NaN of nothing."""
    if not len(values):
        return [float("nan")] * len(levels)
    return [float(value) for value in np.quantile(values, levels)]


def mean(values: Floats) -> float:
    """NaN of nothing."""
    return float(values.mean()) if len(values) else float("nan")


def _finite(values: Floats) -> Floats:
    kept: Floats = values[np.isfinite(values)]
    return kept


def _buckets(values: Floats, edges: tuple[tuple[int, str], ...], last: str) -> Labels:
    names = np.array([name for _, name in edges] + [last])
    found: Labels = names[np.searchsorted(np.array([edge for edge, _ in edges]), values)]
    return found
