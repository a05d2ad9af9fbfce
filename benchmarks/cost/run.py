"""From options to rows: starts the engine for grid and loads, then the pool."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cost.arms import MODEL, Arms
from benchmarks.cost.claims import FILE, Claims
from benchmarks.cost.engine import cells_of, model_folder, reference_settings
from benchmarks.cost.grid import run_grid
from benchmarks.cost.load import Loads, load_turns
from benchmarks.cost.metadata import Metadata
from benchmarks.cost.plan import WORKER, left, planned
from benchmarks.cost.pool_run import PRECISION, PROFILE, UNFED, run_pool, supplies_of
from benchmarks.cost.rows import GRID, LOAD, POOL, Rows, done
from benchmarks.harness.progress import Bar, Clock
from policies import distance, margin
from policies.errors import CountersignError, ProfileError
from policies.profile import ProfileKey, fit
from policies.settings import ReferenceSettings


def measure(options: argparse.Namespace, arms: Sequence[str], began: str, load: float | None = None) -> bool:
    """Run what has no row yet; whether everything is measured now.

    Raises:
        CountersignError: the folder holds rows of another model or engine, something does not start, or nothing is
            asked for.
    """
    folder: Path = options.output_dir
    if not (arms and cells_of(options)) and not (options.load and options.load_arms) and not options.pool:
        raise CountersignError("nothing is left to measure: no cell or arm of the grid, no load, no pool")
    if not options.resume:
        for name in (GRID, LOAD, POOL, FILE, PROFILE, "metadata.json"):
            (folder / name).unlink(missing_ok=True)
    if options.pool and not (options.load and WORKER in options.load_arms) and not supplies_of(options):
        raise CountersignError(UNFED)
    settings = reference_settings(options, model_folder(options))
    metadata = Metadata(folder / "metadata.json", options, settings, began, load)
    clock, bar = Clock(options.time_limit), Bar("cost")
    complete = _engine_part(options, arms, settings, metadata, clock, bar)
    if options.pool and clock.fits("pool", 0):
        complete = asyncio.run(run_pool(options, settings, metadata, clock, bar)) and complete
    metadata.end(clock.elapsed)
    return complete


def _engine_part(
    options: argparse.Namespace,
    arms: Sequence[str],
    settings: ReferenceSettings,
    metadata: Metadata,
    clock: Clock,
    bar: Bar,
) -> bool:
    folder: Path = options.output_dir
    rows, load_rows, claims = Rows(folder / GRID), Rows(folder / LOAD), Claims(folder / FILE)
    tasks = planned(options, arms)
    todo = left(tasks, done(rows))
    measured = {(row["load"], row["arm"], row["iter"]) for row in load_rows if not row["error"]}
    waiting = any(
        (load.name, *turn) not in measured
        for load in options.load
        for turn in load_turns(options.load_arms, options.load_repeats)
    )
    if not todo and not waiting:
        return True
    bar.say(f"starting the engine; {len(todo)} of {len(tasks)} runs of the grid to go")
    with Arms(settings, top_k=options.top_k, runtime=options.runtime, precision=PRECISION) as engine:
        metadata.engine(engine.name, engine.scores_ids, clock.elapsed)
        bar.say(f"{engine.name} is ready after {clock.elapsed:.0f} s")
        runner = Loads(
            engine,
            load_rows,
            claims,
            clock,
            bar,
            top_k=options.top_k,
            seed=options.seed,
            worker=WORKER in options.load_arms,
        )
        # Loads first: they are short, and the pool needs them even when the time is too short for the grid.
        complete = runner.run(options.load, options.load_arms, options.load_repeats)
        if runner.replays:
            _fit(folder / PROFILE, runner.replays, engine.name, options)
        return (
            run_grid(
                engine,
                todo,
                rows,
                claims,
                clock,
                bar,
                warmup=options.warmup,
                seed=options.seed,
                top_k=options.top_k,
                worker=WORKER in arms,
            )
            and complete
        )


def _fit(path: Path, replays: Sequence[Any], reference: str, options: argparse.Namespace) -> None:
    """A profile of this very engine, so that `distance` and `margin` have their whole work to do in the pool."""
    measured = [
        row
        for evidence, replay in replays
        for row in (*distance.calibration_rows(evidence, replay), *margin.calibration_rows(evidence, replay))
    ]
    key = ProfileKey(MODEL, options.runtime, PRECISION, reference, top_k=options.top_k)
    with contextlib.suppress(ProfileError):
        path.write_text(fit(measured, key, made={"by": "bench cost"}).to_json())
