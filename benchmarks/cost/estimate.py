"""What `bench cost` would run, and about how long that takes, from rows of an earlier run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.cost.engine import cells_of
from benchmarks.cost.plan import PLAIN, WORKER, Task, left, planned, warm_ups
from benchmarks.cost.rows import GRID, LOAD, done, read, seconds_of
from benchmarks.harness import config
from benchmarks.harness.plan import Plan

COMMITTED = Path(__file__).parents[1] / "results" / "cost"
START = 185.0
"""Seconds until an 8B engine runs."""

Pace = dict[str, float]


def described(options: argparse.Namespace, arms: Sequence[str], load_arms: Sequence[str]) -> Plan:
    """The plan, with the pace of the output folder's rows or, where there are none, of those that come with it."""
    tasks = planned(options, arms)
    own = options.output_dir / GRID
    todo = left(tasks, done(read(own) if options.resume else []))
    pace = _pace(options.output_dir) or _pace(COMMITTED)
    known = all(arm in pace for arm in {*arms, *(load_arms if options.load else ())})
    seconds = START + sum(_seconds(task, pace, options) for task in todo) + _at_load(options, load_arms, pace)
    lines = [
        [f"{one} / {other}", str(sum(task.cell == (one, other) for task in tasks))] for one, other in _cells(options)
    ]
    loads = ", ".join(load.name for load in options.load) or "none"
    return Plan(
        f"bench cost, to {options.output_dir}",
        list(arms) or ["none of the grid"],
        [["tokens in / out", "runs"], *lines],
        [f"{task.arm}, {task.input_len} / {task.output_len}, run {task.iter + 1}" for task in tasks],
        done=len(tasks) - len(todo),
        seconds=seconds if known else None,
        basis="at the pace of rows that are there, an H200's unless the folder has its own; the start about 3 min",
        facts=[
            *([text] if (text := config.about("cost", options.config)) else []),
            f"Model {options.model}; loads: {loads}, arms {', '.join(load_arms)}; "
            f"pool: {'yes' if options.pool else 'no'}.",
        ],
    )


def _cells(options: argparse.Namespace) -> list[tuple[int, int]]:
    return list(dict.fromkeys(cells_of(options))) if options.arms else []


def _at_load(options: argparse.Namespace, arms: Sequence[str], pace: Pace) -> float:
    """Seconds of all loads and of the pool's phases."""
    seconds = 6 * options.pool_seconds * max(len(options.load), 1) if options.pool else 0.0
    for load in options.load:
        for arm in arms:
            generates = arm in (PLAIN, WORKER)
            tokens = load.output_tokens if generates else load.tokens * options.load_repeats
            seconds += tokens * pace.get(f"load {arm}", 0.0)
    return float(seconds)


def _pace(folder: Path) -> Pace:
    """Seconds per output token of generation and per token of a replay, by arm: one at a time, and at load."""
    found: dict[str, list[float]] = {}
    for row in read(folder / LOAD):
        if not row["error"]:
            tokens = row["output_tokens"] if row["arm"] in (PLAIN, WORKER) else row["tokens"]
            found.setdefault(f"load {row['arm']}", []).append(row["seconds"] / tokens)
    for row in read(folder / GRID):
        seconds = seconds_of(row)
        if seconds is not None:
            tokens = row["output_len"] if row["arm"] == WORKER else row["total_tokens"]
            found.setdefault(row["arm"], []).append(seconds / tokens)
    pace = {name: float(np.median(each)) for name, each in found.items()}
    # Loads alone know generation without logprobs.
    return {PLAIN: pace.get(f"load {PLAIN}", 0.0)} | pace if pace else {}


def _seconds(task: Task, pace: Pace, options: argparse.Namespace) -> float:
    """Of one run, with its share of the warm-ups."""
    runs: int = (options.worker_repeats or options.repeats) if task.arm == WORKER else options.repeats
    tokens = task.output_len if task.arm == WORKER else task.total_tokens
    return float(tokens) * pace.get(task.arm, 0.0) * (1 + warm_ups(task.output_len, options.warmup) / runs)
