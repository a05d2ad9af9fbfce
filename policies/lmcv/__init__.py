"""Logprob-based Model Consistency Verification (TrueOpen/lmcv-experiments, 2026), as it stands and for comparison.

    rows      columns.compare(evidence, replay)       24 columns of its CSV, one row per token
    metrics   summary.summarise(rows)                 means, quantiles, counts
    verdict   verdicts.verdict(metrics, policy)       PASS, REJECT or INCONCLUSIVE under a named policy

beside `legality` (was the token among the registered top-k), `spikes` (windows and runs), `moe` (layer-0 routing) and
`calibration` (thresholds of one's own). Logprobs are nats.
"""

from __future__ import annotations

from policies.evidence import Evidence, Replay
from policies.lmcv.columns import CSV_COLUMNS, Listing, Rows, compare, concatenate, listing, rows
from policies.lmcv.rules import POLICIES, BatchRule, Bound, Branch, Policy
from policies.lmcv.spikes import WINDOW_THRESHOLDS, bad_window_rate
from policies.lmcv.summary import depth_buckets, fixed_point, grouped, input_buckets, summarise
from policies.lmcv.verdicts import BatchDecision, Decision, batch_verdict, verdict


def sample_metrics(evidence: Evidence, replay: Replay) -> dict[str, float]:
    """Every metric of one generation, with `bad_window_rate_w3/5/16/32`; NaN where one does not exist."""
    found = compare(evidence, replay)
    windows = {
        f"bad_window_rate_w{width}": bad_window_rate([found.abs_logprob_diff], width) for width in WINDOW_THRESHOLDS
    }
    return summarise(found) | windows


__all__ = [
    "CSV_COLUMNS",
    "POLICIES",
    "BatchDecision",
    "BatchRule",
    "Bound",
    "Branch",
    "Decision",
    "Listing",
    "Policy",
    "Rows",
    "batch_verdict",
    "compare",
    "concatenate",
    "depth_buckets",
    "fixed_point",
    "grouped",
    "input_buckets",
    "listing",
    "rows",
    "sample_metrics",
    "summarise",
    "verdict",
]
