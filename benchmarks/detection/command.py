"""`countersign bench detection`: judges recorded answers of honest and cheating engines, and writes the tables.

countersign bench detection --recordings DIR --output DIR    judge the recordings (see `record`), write rows too
countersign bench detection --output DIR                     tables again, from the rows that are there
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import platform
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.detection import tables
from benchmarks.detection.attacks import arms
from benchmarks.detection.evidence import recorded_names
from benchmarks.detection.judging import Profiles, Row, calibrate, judge

ROWS = "rows.csv.gz"
METADATA = "metadata.json"
SUMMARY = "summary.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Judge or only tabulate; returns 0."""
    parser = argparse.ArgumentParser(
        prog="countersign bench detection", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recordings", type=Path, help="folder of recordings; without it the rows are read back")
    parser.add_argument("--output", type=Path, required=True, help="folder of rows, metadata and tables")
    parser.add_argument("--runtime", default="vllm-0.32-v2", help="noise of the recorded engines")
    parser.add_argument("--engine", default="", help="where they ran, for the record")
    arguments = parser.parse_args(argv)
    if arguments.recordings:
        _judge_all(arguments)
    rows = read_rows(arguments.output / ROWS)
    metadata = json.loads((arguments.output / METADATA).read_text())
    (arguments.output / SUMMARY).write_text(summary(rows, metadata))
    print(f"wrote {arguments.output / SUMMARY}", flush=True)
    return 0


def _judge_all(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.recordings
    started = time.monotonic()
    profiles = calibrate(folder, runtime=arguments.runtime, engine=arguments.engine)
    names = [name for name in recorded_names(folder) if not name.startswith("calibration-")]
    rows: list[Row] = []
    for arm in arms(folder, names, runtime=arguments.runtime, engine=arguments.engine):
        rows += judge(arm, profiles)
        print(f"{time.monotonic() - started:5.0f} s  {arm.name}: {len(arm.answers)} answers", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_rows(arguments.output / ROWS, rows)
    (arguments.output / METADATA).write_text(json.dumps(_metadata(arguments, profiles), indent=1) + "\n")


def _metadata(arguments: argparse.Namespace, profiles: Profiles) -> dict[str, Any]:
    made = arguments.recordings / "made.json"
    return {
        "recorded": json.loads(made.read_text()) if made.is_file() else {},
        "judged": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "runtime": arguments.runtime,
        "engine": arguments.engine,
        "calibration": {
            name: {"answers": profile.responses, "tokens": profile.tokens, "cells": len(profile.cells)}
            for name, profile in (("dense", profiles.dense), ("experts", profiles.experts))
            if profile is not None
        },
    }


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


def summary(rows: Sequence[Row], metadata: dict[str, Any]) -> str:
    """Every table, as Markdown."""
    calibration = ", ".join(
        f"{name}: {found['answers']} answers, {found['tokens']} tokens, {found['cells']} cells"
        for name, found in metadata["calibration"].items()
    )
    parts = [
        "# Detection on recorded answers",
        f"{metadata['engine']}. {len(rows)} judgements; profiles made of other prompts ({calibration}).",
        "Every answer is audited once in form `full`. The last column is the median, over random orders, of how many "
        "answers and tokens it takes until the evidence of all checks together reaches 1,000,000 (`policies.betting`).",
        "## Honest",
        tables.markdown(tables.verdicts(rows, "honest")),
        "## A second pass of the declared model",
        tables.markdown(tables.verdicts(rows, "twin")),
        "## Cheats",
        tables.markdown(tables.verdicts(rows, "cheat")),
        "## Deciding scores: median (smallest–largest)",
        tables.markdown(tables.scores(rows)),
        *(
            part
            for length in tables.LENGTHS
            for part in (
                f"## Statistics at {length} tokens: d′ of one answer, and share detected at 1 % false alarms",
                tables.markdown(tables.effects(rows, length)),
            )
        ),
        "## LMCV's rules as they stand (made for other models and other K)",
        tables.markdown(tables.strangers(rows)),
    ]
    return "\n\n".join(parts) + "\n"
