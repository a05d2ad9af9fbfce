"""From raw rows to one line per cell: LMCV's seventeen columns, then ours. Nothing is extrapolated."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from benchmarks.cost.plan import ARMS, DICTS, FLAT, IDS, PREFILL, WORKER
from benchmarks.cost.rows import seconds_of
from benchmarks.harness.rows import Row

Cell = tuple[int, int]

LMCV_COLUMNS = (
    "input_len",
    "output_len",
    "total_tokens",
    "gen_tokens",
    "worker_total_median_s",
    "worker_total_mean_s",
    "worker_total_p10_s",
    "worker_total_p90_s",
    "worker_ttft_median_s",
    "worker_decode_median_s",
    "worker_tok_per_s_median",
    "verifier_total_median_s",
    "verifier_total_mean_s",
    "verifier_total_p10_s",
    "verifier_total_p90_s",
    "verifier_tok_per_s_median",
    "worker_over_verifier_median",
)
"""LMCV's `latency_summary.csv`. Its verifier is one prefill with `prompt_logprobs` in dict form: our arm `dicts`."""

FEWEST = 3
"""Runs that an interval needs."""
PUBLISHED = {
    "Qwen3-8B, RTX 4090": "qwen3_8b_rtx4090.csv",
    "Qwen3-32B, H100 NVL": "qwen3_32b_h100nvl.csv",
}


@dataclass(frozen=True, slots=True)
class Times:
    """The good runs of one arm on one cell, in seconds."""

    values: tuple[float, ...] = ()
    failed: int = 0

    @property
    def n(self) -> int:
        """How many there are."""
        return len(self.values)

    @property
    def median(self) -> float | None:
        """None without a run."""
        return float(np.median(self.values)) if self.values else None

    @property
    def mean(self) -> float | None:
        """None without a run."""
        return float(np.mean(self.values)) if self.values else None

    def quantile(self, q: float) -> float | None:
        """None with fewer than `FEWEST` runs."""
        return float(np.quantile(self.values, q)) if self.n >= FEWEST else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Smallest and largest run; they hold the true median with probability 1 − 2^(1−n) (order statistics)."""
        return (min(self.values), max(self.values)) if self.n >= FEWEST else None


Grid = Mapping[Cell, Mapping[str, Times]]


def grid(rows: Iterable[Row]) -> dict[Cell, dict[str, Times]]:
    """The times of every cell and arm that has rows; a run that was repeated after a failure counts once."""
    good: dict[tuple[Cell, str], dict[int, float]] = defaultdict(dict)
    failed: dict[tuple[Cell, str], set[int]] = defaultdict(set)
    for row in rows:
        place = (row["input_len"], row["output_len"]), row["arm"]
        seconds = seconds_of(row)
        if seconds is None:
            failed[place].add(row["iter"])
        else:
            good[place][row["iter"]] = seconds
    cells: dict[Cell, dict[str, Times]] = defaultdict(dict)
    for place in {*good, *failed}:
        times = Times(tuple(good[place].values()), len(failed[place] - set(good[place])))
        cells[place[0]][place[1]] = times
    return dict(sorted(cells.items()))


def ratio(cells: Grid, cell: Cell, arm: str) -> float | None:
    """Median worker ÷ median of the arm; None when either is missing."""
    times = cells.get(cell, {})
    above, below = times.get(WORKER, Times()).median, times.get(arm, Times()).median
    return None if above is None or not below else above / below


def ratio_interval(cells: Grid, cell: Cell, arm: str) -> tuple[float, float] | None:
    """Between the ends of both intervals; None where either has fewer than `FEWEST` runs."""
    times = cells.get(cell, {})
    above, below = times.get(WORKER, Times()).interval, times.get(arm, Times()).interval
    return None if above is None or below is None else (above[0] / below[1], above[1] / below[0])


def columns() -> list[str]:
    """Of `latency_summary.csv`: LMCV's, then ours."""
    ours = [f"{WORKER}_n"]
    for arm in ARMS[1:]:
        ours += [f"{arm}_{what}" for what in ("n", "median_s", "p10_s", "p90_s", "tok_per_s_median")]
    ours += [f"worker_over_{arm}_median" for arm in (FLAT, IDS, PREFILL)]
    ours += ["worker_over_ids_low", "worker_over_ids_high", "errors"]
    return [*LMCV_COLUMNS, *ours]


def table(cells: Grid) -> list[dict[str, object]]:
    """One dict per cell with the fields of `columns`; what was not measured is an empty string.

    Time to first token and decoding time are `nan`, as in LMCV's own files: the engine reports neither.
    """
    return [_line(cells, cell) for cell in cells]


def write_csv(path: Path, cells: Grid) -> None:
    """Write `latency_summary.csv`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table(cells))


def published() -> dict[str, list[dict[str, float]]]:
    """LMCV's grids as they published them, by model and GPU."""
    found = {}
    for name, file in PUBLISHED.items():
        lines = files("benchmarks.cost").joinpath("lmcv", file).read_text(encoding="utf-8").splitlines()
        found[name] = [
            {key: float(value) for key, value in row.items() if value != ""} for row in csv.DictReader(lines)
        ]
    return found


def _line(cells: Grid, cell: Cell) -> dict[str, object]:
    times = cells[cell]
    total = sum(cell)
    worker = times.get(WORKER, Times())
    line: dict[str, object] = {
        "input_len": cell[0],
        "output_len": cell[1],
        "total_tokens": total,
        "gen_tokens": cell[1],
        **_lmcv("worker", worker, cell[1]),
        "worker_ttft_median_s": math.nan,
        "worker_decode_median_s": math.nan,
        **_lmcv("verifier", times.get(DICTS, Times()), total),
        "worker_over_verifier_median": ratio(cells, cell, DICTS),
        "worker_n": worker.n,
    }
    for arm in ARMS[1:]:
        each = times.get(arm, Times())
        line |= {
            f"{arm}_n": each.n,
            f"{arm}_median_s": each.median,
            f"{arm}_p10_s": each.quantile(0.1),
            f"{arm}_p90_s": each.quantile(0.9),
            f"{arm}_tok_per_s_median": _rate(total, each.median),
        }
    line |= {f"worker_over_{arm}_median": ratio(cells, cell, arm) for arm in (FLAT, IDS, PREFILL)}
    line["worker_over_ids_low"], line["worker_over_ids_high"] = ratio_interval(cells, cell, IDS) or (None, None)
    line["errors"] = sum(each.failed for each in times.values())
    return {key: "" if line[key] is None else line[key] for key in columns()}


def _lmcv(who: str, times: Times, tokens: int) -> dict[str, float | None]:
    return {
        f"{who}_total_median_s": times.median,
        f"{who}_total_mean_s": times.mean,
        f"{who}_total_p10_s": times.quantile(0.1),
        f"{who}_total_p90_s": times.quantile(0.9),
        f"{who}_tok_per_s_median": _rate(tokens, times.median),
    }


def _rate(tokens: int, seconds: float | None) -> float | None:
    return tokens / seconds if seconds else None


def lengths_of(cells: Iterable[Cell]) -> tuple[Sequence[int], Sequence[int]]:
    """Input and output lengths that occur, ascending."""
    found = list(cells)
    return sorted({cell[0] for cell in found}), sorted({cell[1] for cell in found})
