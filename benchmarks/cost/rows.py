"""Raw rows on disk, one JSON object a line: appended as they are measured, read back to go on or to report."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.cost.plan import WORKER, Task
from policies.errors import CountersignError

GRID = "latency_raw.jsonl"
LOAD = "load_raw.jsonl"
POOL = "pool_raw.jsonl"

Row = dict[str, Any]

_COLUMNS = {
    GRID: {"input_len", "output_len", "arm", "iter", "worker_total_s", "verifier_total_s", "error"},
    LOAD: {"load", "arm", "iter", "requests", "tokens", "output_tokens", "seconds", "error"},
    POOL: {"phase", "share", "error"},
}
_PATH = re.compile(r"""(?:file://|(?<![\w/:.~])~?)(?:/[^\s/:'",;()<>\[\]]+){2,}/?""")


class Rows:
    """One file of rows. A line that a killed run left half written is dropped when the file is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _mend(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row and see that it is on disk: the next run may kill the machine."""
        row = {**row, **({"error": unplaced(row["error"])} if "error" in row else {})}
        with self.path.open("ab") as file:
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def __iter__(self) -> Iterator[Row]:
        return iter(read(self.path))


def read(path: Path) -> list[Row]:
    """The rows of a file; none when there is no such file. Raises CountersignError when a whole line is no row."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or _COLUMNS.get(path.name, set()) - {*row}:
            raise CountersignError(f"{path}, line {number}: no row of this benchmark")
        rows.append(row)
    return rows


def unplaced(value: Any) -> Any:
    """JSON without the folders of this machine: of paths, also inside texts, the last part is left."""
    if isinstance(value, str):
        return _PATH.sub(lambda found: os.path.basename(found[0].rstrip("/")), value)
    if isinstance(value, dict):
        return {key: unplaced(each) for key, each in value.items()}
    return [unplaced(each) for each in value] if isinstance(value, list | tuple) else value


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


def done(rows: Iterable[Row]) -> set[Task]:
    """Tasks that have a good row."""
    return {
        Task(row["input_len"], row["output_len"], row["arm"], row["iter"])
        for row in rows
        if seconds_of(row) is not None
    }


def _mend(path: Path) -> None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        os.truncate(path, whole)
