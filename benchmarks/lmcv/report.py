"""Short Markdown pages for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

OUTLIERS = 50
_SHOWN = (
    "sample_id",
    "depth",
    "target_token_id",
    "abs_logprob_diff",
    "worker_selected_rank",
    "verifier_selected_rank",
    "topk_jaccard",
    "union_js_divergence",
)


def outliers(records: Sequence[Mapping[str, str]], counts: Mapping[str, Any]) -> str:
    """`summary.md` of `verify`: counts and the tokens that differ most."""
    worst = sorted(records, key=lambda record: -_number(record["abs_logprob_diff"]))[:OUTLIERS]
    lines = ["# Worker against verifier", "", *(f"- {name}: {value}" for name, value in counts.items()), ""]
    return "\n".join([*lines, f"## The {len(worst)} largest differences", "", *table(_SHOWN, worst), ""])


def table(columns: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a Markdown table."""
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return head + [f"| {' | '.join(_cell(record.get(name)) for name in columns)} |" for record in records]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else ""
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -math.inf
