"""JSONL that can be continued after a crash, CSV of LMCV's columns, and the metadata beside them."""

from __future__ import annotations

import csv
import math
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from policies.errors import CountersignError
from policies.lmcv.columns import CSV_COLUMNS, INTEGER_COLUMNS, NUMERIC_COLUMNS, Rows

Row = dict[str, Any]


class PipelineError(CountersignError):
    """A file or server the pipeline needs is not as it must be; the message says which and why."""


def read_jsonl(path: Path) -> list[Row]:
    """Every row of a file. A last line that was cut off in the middle is left out.

    Raises:
        PipelineError: the file cannot be read, or another line is no JSON object.
    """
    return list(_read_jsonl(path))


def _read_jsonl(path: Path) -> Iterator[Row]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise PipelineError(f"{path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if number == len(lines):
                return
            raise PipelineError(f"{path}, line {number}: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("sample_id"), str):
            raise PipelineError(f"{path}, line {number}: an object with a `sample_id` is expected")
        yield row


def latest(rows: Iterable[Row]) -> dict[str, Row]:
    """The last row of each sample, in order of first appearance: a repeated attempt replaces a failed one."""
    found: dict[str, Row] = {}
    for row in rows:
        found[row["sample_id"]] = row
    return found


class Appender:
    """Appends rows to a JSONL file, each whole and flushed. A line cut off by a crash is removed first."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume and path.exists():
            _drop_partial_line(path)
        self._file = path.open("ab" if resume else "wb")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        self._file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _drop_partial_line(path: Path) -> None:
    with path.open("rb+") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all; NaN and infinities become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY) + b"\n")
    os.replace(partial, path)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV with a header; a missing or not finite number is an empty field."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: field(row.get(name)) for name in columns} for row in rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    """Every record of a CSV with a header. Fields may hold newlines.

    Raises:
        PipelineError: the file cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PipelineError(f"{path}: {error}") from error


def field(value: Any) -> Any:
    """A value as a CSV field."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return ""
        return int(value) if value.is_integer() and abs(value) < 2**53 and value != 0 else value
    return "" if value is None else value


def metric_records(
    sample_id: str, rows: Rows, tokens: Sequence[str], worker_mode: str, verifier_mode: str
) -> Iterator[Row]:
    """Records of `worker_vs_verifier_depth_metrics.csv` of one sample; `tokens` are the decoded served tokens."""
    columns = {name: getattr(rows, name).tolist() for name in NUMERIC_COLUMNS}
    for at in range(len(rows)):
        record: Row = {"sample_id": sample_id, "worker_trace_mode": worker_mode, "verifier_trace_mode": verifier_mode}
        record["target_decoded_token"] = tokens[at] if at < len(tokens) else ""
        for name, values in columns.items():
            record[name] = _number(name, values[at])
        yield record


def _number(name: str, value: float) -> Any:
    if math.isnan(value):
        return ""
    return int(value) if name in INTEGER_COLUMNS and math.isfinite(value) else value


class MetricsFile:
    """Appends samples to the metrics CSV. On resume, keeps only samples that are there in full."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.done: frozenset[str] = frozenset()
        kept: list[dict[str, str]] = []
        if resume and path.exists():
            kept = self._whole(read_csv(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        write_csv(path, CSV_COLUMNS, kept)
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, CSV_COLUMNS, lineterminator="\n")

    def write(self, records: Iterable[Row]) -> int:
        """Append one sample; returns how many rows."""
        found = list(records)
        self._writer.writerows(found)
        self._file.flush()
        return len(found)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _whole(self, records: list[dict[str, str]]) -> list[dict[str, str]]:
        depths: dict[str, set[str]] = {}
        expected: dict[str, str] = {}
        for record in records:
            if None in record.values() or None in record:
                continue
            depths.setdefault(record["sample_id"], set()).add(record["depth"])
            expected[record["sample_id"]] = record["output_token_count"]
        self.done = frozenset(name for name, seen in depths.items() if str(len(seen)) == expected[name])
        return [record for record in records if record["sample_id"] in self.done]


def metadata(argv: Sequence[str], **more: Any) -> dict[str, Any]:
    """Where and when a file was made. Keys never come by argument, so there is none in `argv`."""
    return {
        "metadata": {
            "argv": list(argv),
            "created_at_unix": time.time(),
            "platform": platform.platform(),
            "python": sys.version.split()[0],
        },
        **more,
    }
