"""`countersign bench detection`: judges recorded answers of honest and cheating engines, and writes tables and plots.

countersign bench detection --recordings DIR --output DIR    judge the recordings (see `record`), arm by arm
countersign bench detection --output DIR                     the report again, from the rows that are there

Arms that have their rows are not judged again. Live cheats are `countersign attack run … --output DIR`, whose folder
`countersign bench report DIR` reads as well.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.detection.attacks import Arm, arms
from benchmarks.detection.evidence import recorded_names
from benchmarks.detection.judging import Profiles, Row, calibrate, judge
from benchmarks.detection.report import SUMMARY, remake
from benchmarks.detection.rows import ROWS, read_rows, write_rows
from benchmarks.harness import config, machine
from benchmarks.harness.metadata import FILE
from benchmarks.harness.plan import Plan
from benchmarks.harness.progress import Bar, Clock
from policies.errors import CountersignError

BENCH = "detection"
ANSWERS_PER_SECOND = 60.0
"""Judged on one core, about."""


def main(argv: Sequence[str] | None = None) -> int:
    """Judge or only report; returns 0. Raises CountersignError."""
    options = config.parse(parser(), BENCH, list(argv or ()))
    if options.recordings is None:
        if options.dry_run:
            raise CountersignError("bench detection: --dry-run needs --recordings: without them nothing is judged")
    else:
        planned = list(_arms(options))
        if options.dry_run:
            print(plan(options, planned).text())
            return 0
        _judge_all(options, planned)
    try:
        remake(options.output, plots=not options.no_plots)
    except OSError as error:
        raise CountersignError(f"bench detection: {error.filename}: {error.strerror}") from error
    print(f"wrote {options.output / SUMMARY}", flush=True)
    return 0


def parser() -> argparse.ArgumentParser:
    """Of the options."""
    made = argparse.ArgumentParser(
        prog="countersign bench detection", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    config.add_arguments(made, BENCH)
    made.add_argument("--recordings", type=Path, help="folder of recordings; without it the rows are read back")
    made.add_argument("--output", type=Path, default=Path("benchmarks/results/detection/h200"), metavar="DIR")
    made.add_argument("--runtime", default="vllm-0.32-v2", help="noise of the recorded engines")
    made.add_argument("--engine", default="", help="where they ran, for the record")
    made.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="go on from the rows")
    made.add_argument("--no-plots", action="store_true", help="tables only; needs no matplotlib")
    return made


def _arms(options: argparse.Namespace) -> list[Arm]:
    names = [name for name in recorded_names(options.recordings) if not name.startswith("calibration-")]
    if not names:
        raise CountersignError(f"bench detection: {options.recordings} holds no recordings")
    return list(arms(options.recordings, names, runtime=options.runtime, engine=options.engine))


def plan(options: argparse.Namespace, planned: Sequence[Arm]) -> Plan:
    """What would be judged."""
    known = {row["arm"] for row in _known(options)}
    todo = [arm for arm in planned if arm.name not in known]
    return Plan(
        f"bench detection, to {options.output}",
        [arm.name for arm in planned],
        [["arm", "kind", "answers", "what"], *([a.name, a.kind, str(len(a.answers)), a.about] for a in planned)],
        [f"{arm.name}: {len(arm.answers)} answers" for arm in planned],
        done=len(planned) - len(todo),
        seconds=sum(len(arm.answers) for arm in todo) / ANSWERS_PER_SECOND,
        basis=f"{ANSWERS_PER_SECOND:g} answers a second",
        facts=[text] if (text := config.about(BENCH, options.config)) else [],
    )


def _known(options: argparse.Namespace) -> list[Row]:
    path = options.output / ROWS
    return read_rows(path) if options.resume and path.exists() else []


def _judge_all(options: argparse.Namespace, planned: Sequence[Arm]) -> None:
    load, clock, bar = machine.load(), Clock(), Bar(BENCH)
    profiles = calibrate(options.recordings, runtime=options.runtime, engine=options.engine)
    rows = _known(options)
    known = {row["arm"] for row in rows}
    todo = [arm for arm in planned if arm.name not in known]
    options.output.mkdir(parents=True, exist_ok=True)
    answers = {arm.name: float(len(arm.answers)) for arm in todo}
    for place, arm in enumerate(todo):
        bar.show(arm.name, place, len(todo), clock.left({"answers": sum([*answers.values()][place:])}))
        began = time.monotonic()
        rows += judge(arm, profiles)
        clock.learn("answers", answers[arm.name], time.monotonic() - began)
        write_rows(options.output / ROWS, rows)
    bar.show("judged", len(todo), len(todo), None, last=True)
    found = _metadata(options, profiles) | {"load_before": round(load, 2), "seconds": round(clock.elapsed, 1)}
    (options.output / FILE).write_text(json.dumps(found, indent=1) + "\n")


def _metadata(options: argparse.Namespace, profiles: Profiles) -> dict[str, Any]:
    made = options.recordings / "made.json"
    described = machine.describe()
    return {
        "benchmark": BENCH,
        "recorded": json.loads(made.read_text()) if made.is_file() else {},
        "judged": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": described["python"],
        "machine": described,
        "runtime": options.runtime,
        "engine": options.engine,
        "calibration": {
            name: {"answers": profile.responses, "tokens": profile.tokens, "cells": len(profile.cells)}
            for name, profile in (("dense", profiles.dense), ("experts", profiles.experts))
            if profile is not None
        },
    }
