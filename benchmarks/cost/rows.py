"""The three files of raw rows, and what a row of the grid says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.cost.plan import WORKER, Task
from benchmarks.harness import rows
from benchmarks.harness.rows import Row

GRID = "latency_raw.jsonl"
LOAD = "load_raw.jsonl"
POOL = "pool_raw.jsonl"

_COLUMNS = {
    GRID: {"input_len", "output_len", "arm", "iter", "worker_total_s", "verifier_total_s", "error"},
    LOAD: {"load", "arm", "iter", "requests", "tokens", "output_tokens", "seconds", "error"},
    POOL: {"phase", "share", "error"},
}


class Rows(rows.Rows):
    """One of these files, by its name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _COLUMNS.get(path.name, set()))


def read(path: Path) -> list[Row]:
    """The rows of one of these files; none when there is no such file. Raises CountersignError."""
    return rows.read(path, _COLUMNS.get(path.name, set()))


def grid_row(task: Task, seconds: float | None, *, gen_tokens: int = 0, warmup: int = 0, error: str = "") -> Row:
    """A row of the grid. LMCV's six columns come first, of which one of the two times is null here: arms are rows."""
    worker = task.arm == WORKER
    return {
        "input_len": task.input_len,
        "output_len": task.output_len,
        "total_tokens": task.total_tokens,
        "iter": task.iter,
        "worker_total_s": seconds if worker else None,
        "verifier_total_s": None if worker else seconds,
        "arm": task.arm,
        "gen_tokens": gen_tokens,
        "warmup": warmup,
        "error": error,
    }


def seconds_of(row: Row) -> float | None:
    """The time in a grid row; None in one that failed."""
    found = row["worker_total_s"] if row["arm"] == WORKER else row["verifier_total_s"]
    return None if found is None or row.get("error") else float(found)


def done(measured: Iterable[Row]) -> set[Task]:
    """Tasks that have a good row."""
    return {
        Task(row["input_len"], row["output_len"], row["arm"], row["iter"])
        for row in measured
        if seconds_of(row) is not None
    }
