"""`countersign lmcv summarise`: distributions, windows and a named policy's verdicts from a metrics CSV.

Takes the CSV of `verify` or of LMCV's own verifier (24 columns). Samples named in an `errors.jsonl` beside it count as
INCONCLUSIVE. With --calibrate or --challenger the thresholds come from the samples themselves and are written to
`recommended_thresholds.json`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.lmcv.files import (
    PipelineError,
    Row,
    latest,
    metadata,
    read_csv,
    read_jsonl,
    write_csv,
    write_json,
)
from benchmarks.lmcv.report import table
from benchmarks.lmcv.verify import ERRORS, METRICS
from policies.lmcv import (
    POLICIES,
    Policy,
    Rows,
    batch_verdict,
    calibration,
    depth_buckets,
    fixed_point,
    grouped,
    input_buckets,
    spikes,
    summarise,
    verdict,
)
from policies.lmcv.columns import NUMERIC_COLUMNS
from policies.lmcv.rules import JUDGMENT_FUNCTION_VERSION, TOKEN_SCOPE
from policies.lmcv.summary import COUNTS, DISTRIBUTION_COLUMNS, Metrics
from policies.lmcv.verdicts import INCONCLUSIVE

DECISION_COLUMNS = (
    "group",
    "verdict",
    "reason",
    "count",
    "finite_count",
    "mean_abs_logprob_diff",
    "abs_logprob_diff_p50",
    "abs_logprob_diff_p90",
    "abs_logprob_diff_p95",
    "abs_logprob_diff_p99",
    "rank_delta_nonzero_rate",
    "topk_jaccard_mean",
    "topk_jaccard_p05",
    "union_js_p95",
    "union_js_p99",
    "missing_selected_count",
    "accept_failures",
    "reject_hits",
)
DEFAULT_POLICY = "qwen3-8b-bf16-4090-v1"


def main(argv: Sequence[str]) -> int:
    """Summarise; returns 0, or 1 with --fail-on-reject when the batch or a sample is rejected. Raises PipelineError."""
    arguments = _parser().parse_args(list(argv))
    folder = arguments.output_dir or _beside(arguments.metrics)
    rows, names = read_metrics(arguments.metrics)
    failed = _failed(arguments.metrics, set(names.tolist()))
    k = arguments.k or known_k(arguments.metrics) or infer_k(rows)
    by_sample = grouped(rows, names)
    write_distributions(folder / "distribution", rows, by_sample)
    samples = [np.asarray(rows.abs_logprob_diff[names == name]) for name in by_sample]
    windows = spikes.summary(samples)
    write_json(
        folder / "windows.json", windows | {"thresholds": {str(w): t for w, t in spikes.WINDOW_THRESHOLDS.items()}}
    )
    policy = _policy(arguments, by_sample, k, folder)
    result = decide(by_sample, failed, summarise(rows), policy, k, folder)
    about = metadata(argv)["metadata"]
    args = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    source = str(arguments.metrics)
    write_json(folder / "dense_verification.json", {"args": args} | result | {"source": source, "metadata": about})
    (folder / "verdict.md").write_text(_page(result, windows, by_sample), encoding="utf-8")
    print(_line(result))
    rejected = result["verdict"] == "REJECT" or result["sample_verdict_counts"].get("REJECT", 0) > 0
    return 1 if arguments.fail_on_reject and rejected else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="countersign lmcv summarise", description=__doc__)
    parser.add_argument("--metrics", type=Path, required=True, metavar="PATH", help=f"{METRICS}, or its folder")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="default: the folder of the metrics")
    parser.add_argument("--policy", choices=sorted(POLICIES), default=DEFAULT_POLICY)
    parser.add_argument("--k", type=int, default=0, help="alternatives per position; 0 reads it off the rows")
    parser.add_argument("--calibrate", action="store_true", help="thresholds from these (honest) samples instead")
    parser.add_argument("--challenger", type=Path, metavar="PATH", help="another model's metrics to calibrate against")
    parser.add_argument("--fail-on-reject", action="store_true", help="exit code 1 when something is rejected")
    return parser


def _beside(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def read_metrics(path: Path) -> tuple[Rows, np.ndarray]:
    """The rows of a metrics CSV (or of the one in a folder), and the sample each belongs to.

    Raises:
        PipelineError: it cannot be read, lacks a column, or holds something else than a number.
    """
    file = path / METRICS if path.is_dir() else path
    records = read_csv(file)
    missing = [name for name in ("sample_id", *NUMERIC_COLUMNS) if records and name not in records[0]]
    if missing or not records:
        raise PipelineError(f"{file}: no rows" if not records else f"{file}: no column {', '.join(missing)}")
    try:
        columns = {name: np.array([float(record[name] or "nan") for record in records]) for name in NUMERIC_COLUMNS}
    except (TypeError, ValueError) as error:
        raise PipelineError(f"{file}: {error}") from error
    return Rows(**columns), np.array([record["sample_id"] for record in records])


def known_k(metrics: Path) -> int | None:
    """K as the verifier wrote it beside the metrics; None where it wrote none, or several."""
    try:
        found = orjson.loads((_beside(metrics) / "metadata.json").read_bytes()).get("k")
    except (OSError, ValueError, AttributeError):
        return None
    return int(found[0]) if isinstance(found, list) and len(found) == 1 and isinstance(found[0], int) else None


def infer_k(rows: Rows) -> int | None:
    """Alternatives per position: how many ids most workers' lists hold."""
    sizes = rows.common_top_count + rows.missing_from_verifier_count
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    return int(np.median(sizes)) if len(sizes) else None


def write_distributions(folder: Path, rows: Rows, by_sample: Mapping[str, Metrics]) -> None:
    """`overall`, `by_sample`, `by_input_bucket`, `by_output_depth_bucket` and `by_output_depth`, and each once more
    in integers of 10⁻⁶."""
    depth = np.char.mod("%05d", rows.depth.astype(np.int64))
    groups = {
        "overall": {"overall": summarise(rows)},
        "by_sample": by_sample,
        "by_input_bucket": grouped(rows, input_buckets(rows.input_token_count)),
        "by_output_depth_bucket": grouped(rows, depth_buckets(rows.depth)),
        "by_output_depth": grouped(rows, depth),
    }
    for name, found in groups.items():
        write_csv(folder / f"{name}.csv", DISTRIBUTION_COLUMNS, _records(found))
        numbers = [column for column in DISTRIBUTION_COLUMNS if column not in COUNTS | {"group"}]
        integers = [
            {"group": group} | fixed_point({column: metrics[column] for column in numbers})
            for group, metrics in found.items()
        ]
        write_csv(folder / f"{name}_fp_1e6.csv", ["group", *(f"{column}_fp_1e6" for column in numbers)], integers)


def decide(
    by_sample: Mapping[str, Metrics],
    failed: Mapping[str, str],
    overall: Metrics,
    policy: Policy,
    k: int | None,
    folder: Path,
) -> Row:
    """Writes `sample_decisions.csv`; returns what `dense_verification.json` says of the batch."""
    records, words = [], []
    for name, metrics in by_sample.items():
        found = verdict(metrics, policy, k=k)
        words.append(found.verdict)
        lists = {"accept_failures": "; ".join(found.accept_failures), "reject_hits": "; ".join(found.reject_hits)}
        records.append(_record(name, metrics) | {"verdict": found.verdict, "reason": found.reason} | lists)
    for name, reason in failed.items():
        words.append(INCONCLUSIVE)
        records.append({"group": name, "verdict": INCONCLUSIVE, "reason": f"not verified: {reason}", "count": 0})
    write_csv(folder / "sample_decisions.csv", DECISION_COLUMNS, records)
    batch = asdict(batch_verdict(overall, words, policy, k=k))
    batch["batch_accept_checks"], batch["batch_reject_checks"] = batch.pop("accept_checks"), batch.pop("reject_checks")
    return {"preset": batch["policy"], "passed": batch["verdict"] == "PASS_STRICT", "overall": overall} | batch


def _policy(arguments: argparse.Namespace, by_sample: Mapping[str, Metrics], k: int | None, folder: Path) -> Policy:
    if not (arguments.calibrate or arguments.challenger):
        return POLICIES[arguments.policy]
    base = list(by_sample.values())
    separation: tuple[calibration.Separation, ...] = ()
    try:
        if arguments.challenger:
            other, labels = read_metrics(arguments.challenger)
            challenger = list(grouped(other, labels).values())
            policy, separation = calibration.base_vs_challenger(base, challenger, k=k or 0)
        else:
            policy = calibration.self_calibration(base, k=k or 0)
    except ValueError as error:
        raise PipelineError(f"{arguments.metrics}: {error}") from error
    accept, reject = ({bound.metric: bound.threshold for bound in bounds} for bounds in (policy.accept, policy.reject))
    write_json(
        folder / "recommended_thresholds.json",
        {
            "source": str(arguments.metrics),
            "judgment_function_version": JUDGMENT_FUNCTION_VERSION,
            "token_scope": TOKEN_SCOPE,
            "k": k,
            "pass": accept,
            "reject": reject,
            "pass_fp_1e6": fixed_point(accept),
            "reject_fp_1e6": fixed_point(reject),
            "calibration_policy": policy.name,
            "separation": [asdict(each) for each in separation],
        },
    )
    return policy


def _failed(metrics: Path, verified: set[str]) -> dict[str, str]:
    path = _beside(metrics) / ERRORS
    if not path.exists():
        return {}
    found = latest(read_jsonl(path))
    return {name: str(row.get("error", {}).get("reason")) for name, row in found.items() if name not in verified}


def _records(groups: Mapping[str, Metrics]) -> list[Row]:
    return [_record(name, metrics) for name, metrics in groups.items()]


def _record(name: str, metrics: Metrics) -> Row:
    counts = {column: int(metrics[column]) for column in COUNTS if column in metrics}
    return {"group": name, **metrics, **counts}


def _line(result: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{number} {word}" for word, number in result["sample_verdict_counts"].items())
    notes = "".join(f"\nnote: {note}" for note in result["notes"])
    return f"{result['policy']}: samples {counts}; batch {result['verdict']} ({result['reason']}){notes}"


def _page(result: Mapping[str, Any], windows: Mapping[str, float], by_sample: Mapping[str, Metrics]) -> str:
    worst = sorted(by_sample.items(), key=lambda item: -_or(item[1]["mean_abs_logprob_diff"], 0.0))[:20]
    shown = (
        "group",
        "count",
        "mean_abs_logprob_diff",
        "abs_logprob_diff_p99",
        "rank_delta_nonzero_rate",
        "topk_jaccard_mean",
    )
    return "\n".join(
        [
            f"# {result['policy']}: {result['verdict']}",
            "",
            _line(result),
            "",
            "## Windows and spikes",
            "",
            *table(tuple(windows), [windows]),
            "",
            "## Samples with the largest mean difference",
            "",
            *table(shown, [{"group": name, **metrics} for name, metrics in worst]),
            "",
        ]
    )


def _or(value: float, otherwise: float) -> float:
    return value if math.isfinite(value) else otherwise
