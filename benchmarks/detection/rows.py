"""Judged answers on disk: `rows.jsonl.gz`, to which every arm adds a part of its own, and the same as CSV."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.detection.judging import Row
from policies.errors import CountersignError

ROWS, CSV = "rows.jsonl.gz", "rows.csv.gz"
_GZIP = 16 + zlib.MAX_WBITS


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Add rows as one compressed part, and see that it is on disk. What a killed run left half written goes first."""
    if path.exists():
        whole = max((end for _, end in _parts(path)), default=0)
        if whole != path.stat().st_size:
            os.truncate(path, whole)
    text = "".join(json.dumps(_short(row), default=lambda value: value.item()) + "\n" for row in rows)
    with path.open("ab") as file:
        file.write(gzip.compress(text.encode(), mtime=0))
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> list[Row]:
    """Every row of every whole part, those with an `error` among them; floats have six digits, and None is left out.

    Raises OSError when there is no such file, CountersignError when it is damaged.
    """
    try:
        rows = [json.loads(line) for text, _ in _parts(path) for line in text.splitlines()]
    except ValueError:
        rows = [None]
    if not all(isinstance(row, dict) and "arm" in row for row in rows):
        raise CountersignError(f"{path} is damaged")
    return rows


def judged(rows: Sequence[Row]) -> list[Row]:
    """Those that hold a judgement."""
    return [row for row in rows if not row.get("error")]


def broken(rows: Sequence[Row]) -> list[Row]:
    """Those of answers that could not be judged, and were not since."""
    good = {(row["arm"], row.get("answer")) for row in judged(rows)}
    return [row for row in rows if row.get("error") and (row["arm"], row.get("answer")) not in good]


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Rows as gzipped CSV, a line each."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def _short(row: Row) -> dict[str, Any]:
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in row.items()
        if value is not None
    }


def _parts(path: Path) -> Iterator[tuple[bytes, int]]:
    """Each whole part, and where it ends. Raises CountersignError for what is none."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        unpacked = zlib.decompressobj(_GZIP)
        try:
            text = unpacked.decompress(data[at:])
        except zlib.error as error:
            raise CountersignError(f"{path} is damaged ({error})") from error
        if not unpacked.eof:
            return
        at = len(data) - len(unpacked.unused_data)
        yield text, at
