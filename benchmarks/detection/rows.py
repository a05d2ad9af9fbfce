"""Judged answers on disk, one line each."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.detection.judging import Row

ROWS = "rows.csv.gz"


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Rows as gzipped CSV, the same bytes for the same rows."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _short(value) for name, value in row.items()} for row in rows)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def read_rows(path: Path) -> list[Row]:
    """Rows back, numbers as numbers, empty cells as None. Raises OSError when there are none."""
    text = gzip.decompress(path.read_bytes()).decode()
    return [{name: _read(value) for name, value in row.items()} for row in csv.DictReader(io.StringIO(text))]


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def _read(value: str) -> Any:
    if value == "":
        return None
    try:
        return int(value)
    except ValueError:
        try:
            return float(value)
        except ValueError:
            return value
