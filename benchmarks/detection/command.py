"""`countersign bench detection`: judges recorded answers of honest and cheating engines, and writes tables and plots.

countersign bench detection --recordings DIR --output DIR    judge the recordings (see `record`), arm by arm
countersign bench detection --output DIR                     the report again, from the rows that are there

Answers that have their judgement are not judged again. Live cheats are `countersign attack run … --output DIR`, whose
folder `countersign bench report DIR` reads as well.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.detection.attacks import Arm, arms
from benchmarks.detection.evidence import recorded_names
from benchmarks.detection.judging import Profiles, calibrate, judge, wanted
from benchmarks.detection.report import SUMMARY, remake
from benchmarks.detection.rows import ROWS, append_rows, judged, read_rows
from benchmarks.detection.tables import by_arm
from benchmarks.harness import config, machine
from benchmarks.harness.metadata import FILE, Metadata
from benchmarks.harness.plan import Plan
from benchmarks.harness.progress import Bar, Clock
from policies.errors import CountersignError

BENCH = "detection"
ANSWERS_PER_SECOND = 60.0
"""Judged on one core, about."""
REPORT_SECONDS = 20.0
"""Tables and plots, about."""


def main(argv: Sequence[str] | None = None) -> int:
    """Judge or only report; 1 when an answer could not be judged. Raises CountersignError."""
    options = config.parse(parser(), BENCH, list(argv or ()))
    if options.recordings is not None:
        planned = list(_arms(options))
        if options.dry_run:
            print(plan(options, planned).text())
            return 0
        _judge_all(options, planned)
    elif options.dry_run:
        print(_report_alone(options).text())
        return 0
    try:
        _, failed = remake(options.output, plots=not options.no_plots)
    except OSError as error:
        raise CountersignError(f"bench detection: {error.filename}: {error.strerror}") from error
    print(f"wrote {options.output / SUMMARY}", flush=True)
    return 1 if failed else 0


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
    known = _known(options)
    left = {arm.name: len(wanted(arm).keys() - known.get(arm.name, set())) for arm in planned}
    return Plan(
        f"bench detection, to {options.output}",
        [arm.name for arm in planned],
        [["arm", "kind", "answers", "what"], *([a.name, a.kind, str(len(a.answers)), a.about] for a in planned)],
        [f"{arm.name}: {len(arm.answers)} answers" for arm in planned],
        done=sum(not count for count in left.values()),
        seconds=sum(left.values()) / ANSWERS_PER_SECOND,
        basis=f"{ANSWERS_PER_SECOND:g} answers a second",
        facts=[text] if (text := config.about(BENCH, options.config)) else [],
    )


def _report_alone(options: argparse.Namespace) -> Plan:
    """Without recordings: what the report would be made of."""
    path = options.output / ROWS
    groups = by_arm(read_rows(path) if path.exists() else [])
    return Plan(
        f"bench detection, to {options.output}",
        list(groups) or ["none"],
        [["arm", "rows"], *([name, str(len(rows))] for name, rows in groups.items())],
        [],
        seconds=REPORT_SECONDS,
        basis="tables and plots",
        facts=["Without --recordings nothing is judged: the report is made again of the rows that are there."],
    )


def _known(options: argparse.Namespace) -> dict[str, set[int]]:
    """By arm, the answers that have their judgement."""
    path = options.output / ROWS
    rows = judged(read_rows(path)) if options.resume and path.exists() else []
    return {name: {int(row["answer"]) for row in group} for name, group in by_arm(rows).items()}


def _judge_all(options: argparse.Namespace, planned: Sequence[Arm]) -> None:
    began, load = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), machine.load()
    clock, bar = Clock(), Bar(BENCH)
    options.output.mkdir(parents=True, exist_ok=True)
    if not options.resume:
        for name in (ROWS, FILE):
            (options.output / name).unlink(missing_ok=True)
    known = _known(options)
    todo = [arm for arm in planned if wanted(arm).keys() - known.get(arm.name, set())]
    if not todo:
        return
    metadata = Metadata(options.output / FILE, BENCH, _what(options), _shown(options), began=began, load=load)
    bar.say("making the profiles")
    profiles = calibrate(options.recordings, runtime=options.runtime, engine=options.engine)
    metadata.note(calibration=_calibration(profiles))
    answers = {arm.name: float(len(wanted(arm).keys() - known.get(arm.name, set()))) for arm in todo}
    for place, arm in enumerate(todo):
        bar.show(arm.name, place, len(todo), clock.left({"answers": sum([*answers.values()][place:])}))
        start = clock.elapsed
        append_rows(options.output / ROWS, judge(arm, profiles, known.get(arm.name, set())))
        clock.learn("answers", answers[arm.name], clock.elapsed - start)
    bar.show("judged", len(todo), len(todo), None, last=True)
    metadata.end(clock.elapsed)


def _what(options: argparse.Namespace) -> dict[str, Any]:
    made = options.recordings / "made.json"
    recorded = json.loads(made.read_text()) if made.is_file() else {}
    return {"recorded": recorded, "runtime": options.runtime, "engine": options.engine}


def _shown(options: argparse.Namespace) -> dict[str, Any]:
    shown = {name: value for name, value in vars(options).items() if name not in ("output", "dry_run")}
    return shown | {"recordings": options.recordings.name}


def _calibration(profiles: Profiles) -> dict[str, Any]:
    return {
        name: {"answers": profile.responses, "tokens": profile.tokens, "cells": len(profile.cells)}
        for name, profile in (("dense", profiles.dense), ("experts", profiles.experts))
        if profile is not None
    }
