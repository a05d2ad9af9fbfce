"""The pool's part of a run: its phases, one after the other, on what the loads' workers answered."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cost.arms import BACKEND, MODEL
from benchmarks.cost.claims import FILE, Claims, grid_name, load_name
from benchmarks.cost.feeding import Feeder
from benchmarks.cost.metadata import Metadata
from benchmarks.cost.plan import IDS, Load, loads
from benchmarks.cost.pool import CAPACITY, LATENCY, LEVELS, PHASE, QUEUEING, Phases, Supply
from benchmarks.cost.rows import GRID, LOAD, POOL, Rows, read
from benchmarks.cost.stack import Pool
from benchmarks.harness.progress import Bar, Clock
from benchmarks.harness.usage import Gpu
from policies.errors import CountersignError
from policies.settings import ReferenceSettings

PROFILE = "profile.json"
PRECISION = "bf16"
UNFED = "--pool feeds what --load's workers answered: run --load with its arm `worker` first, or together"
SHARES = (0.0, 0.25)
"""Shares of audits whose replay takes the reference's own top 20 too: none, and the default."""


async def run_pool(
    options: argparse.Namespace, settings: ReferenceSettings, metadata: Metadata, clock: Clock, bar: Bar
) -> bool:
    """Run what has no row yet; whether everything is measured now. Raises CountersignError where nothing can be fed."""
    folder: Path = options.output_dir
    claims, rows = Claims(folder / FILE), Rows(folder / POOL)
    supplies = supplies_of(options)
    cells = sorted(
        (cell, claims[grid_name(cell)])
        for cell in {(row["input_len"], row["output_len"]) for row in read(folder / GRID)}
        if grid_name(cell) in claims and cell[1] <= max(options.output_lengths)
    )
    if not supplies:
        raise CountersignError(UNFED)
    bar.say("starting the pool")
    tree = pool_settings(options, settings, folder / PROFILE)
    complete = True
    with Pool(tree, workers=options.pool_workers) as pool, Gpu() as gpu:
        metadata.pool(options.pool_workers, clock.elapsed)
        bar.say(f"the pool is ready after {clock.elapsed:.0f} s")
        for share in SHARES:
            if share:
                pool.reconfigure({"audit": tree["audit"] | {"full": share}})
            async with Feeder(pool) as feeder:
                waiting = _waiting(rows, supplies)
                phases = Phases(
                    pool,
                    feeder,
                    gpu,
                    rows,
                    clock,
                    bar,
                    options.pool_seconds,
                    share,
                    options.seed,
                    _known(rows),
                    waiting,
                )
                complete = await _phases(options, phases, supplies, cells, folder) and complete
        pool.check()
    return complete


async def _phases(
    options: argparse.Namespace, phases: Phases, supplies: Sequence[Supply], cells: Sequence[Any], folder: Path
) -> bool:
    """One at a time, then flat out, then at shares of that; with the default share of full replays only flat out."""
    if not phases.share:
        await phases.latency(cells, options.pool_repeats)
    complete = True
    for place, supply in enumerate(supplies):
        name = supply.name
        capacity = _found(phases.rows, CAPACITY, name, phases.share)
        if capacity is None:
            if not phases.clock.fits(PHASE, 1):
                complete = False
                continue
            count = _count(folder, supply, options.pool_seconds)
            await phases.capacity(supply, min(32, count), warm=True)
            capacity = (await phases.capacity(supply, count))["per_s"]
        if place or phases.share or not capacity:
            continue
        for level in LEVELS:
            if (QUEUEING, name, phases.share, level) in phases.known:
                continue
            if phases.clock.fits(PHASE, 1):
                await phases.queueing(supply, capacity, level)
            else:
                complete = False
    return complete


def pool_settings(options: argparse.Namespace, settings: ReferenceSettings, profile: Path) -> dict[str, Any]:
    """`countersign.yaml` of the pool, without its store: one model, one backend, every answer audited.

    Texts are held against ids only where the model is a real one: made-up weights answer with random ids, whose text
    is nobody's spelling.
    """
    real = settings.engine["load_format"] != "dummy"
    config = json.loads((Path(str(settings.path)) / "config.json").read_text())
    ends = config.get("eos_token_id")
    model: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "max_model_len": settings.engine["max_model_len"],
        "eos_token_ids": ends if isinstance(ends, list) else [] if ends is None else [ends],
        "reference": settings.model_dump(mode="json", exclude_defaults=True),
    }
    if real:
        model["tokenizer"] = str(settings.path)
    if profile.exists():
        model["profile"] = str(profile.absolute())
    return {
        "models": {MODEL: model},
        "backends": [
            {
                "name": BACKEND,
                "url": "http://127.0.0.1:9",
                "model": MODEL,
                "runtime": options.runtime,
                "precision": PRECISION,
            }
        ],
        "audit": {"rate": 1.0, "full": SHARES[0]},
        # Nothing is shed, so that what is fed is what is verified.
        "verification": {"max_backlog": 10_000_000, "max_backlog_bytes": 2**36, "lost_after": 7200},
    }


def _loads(options: argparse.Namespace, folder: Path) -> list[Load]:
    given = list(options.load) or loads(" ".join(dict.fromkeys(row["load"] for row in read(folder / LOAD))))
    # First the one with the most requests of one kind, whose capacity is steadiest.
    return sorted(given, key=lambda load: (len(set(load.requests)), -len(load.requests)))


def supplies_of(options: argparse.Namespace) -> list[Supply]:
    """What the pool can be fed: the answers of each load's worker."""
    claims = Claims(options.output_dir / FILE)
    loads = _loads(options, options.output_dir)
    return [Supply(load.name, answers) for load in loads if (answers := _answers(claims, load))]


def _answers(claims: Claims, load: Load) -> tuple[Any, ...]:
    names = [load_name(load.name, place) for place in range(len(load.requests))]
    return tuple(claims[name] for name in names if name in claims)


def _count(folder: Path, supply: Supply, seconds: float) -> int:
    """Generations that keep the pool busy for about so long, by what the engine alone did."""
    speeds = [
        row["tokens"] / row["seconds"]
        for row in read(folder / LOAD)
        if row["load"] == supply.name and row["arm"] == IDS and row["seconds"]
    ]
    return max(16, math.ceil(seconds * max(speeds, default=1000.0) / supply.tokens_each))


def _known(rows: Rows) -> set[tuple[Any, ...]]:
    known: set[tuple[Any, ...]] = set()
    for row in rows:
        if row["error"]:
            continue
        if row["phase"] == LATENCY:
            known.add((LATENCY, row["input_len"], row["output_len"], row["iter"]))
        elif row["phase"] == QUEUEING:
            known.add((QUEUEING, row["load"], row["share"], row["level"]))
    return known


def _waiting(rows: Rows, supplies: Sequence[Supply]) -> int:
    """Phases of any share that have no good row."""
    known, first = _known(rows), supplies[0].name
    levels = sum((QUEUEING, first, SHARES[0], level) not in known for level in LEVELS)
    return levels + sum(_found(rows, CAPACITY, each.name, share) is None for share in SHARES for each in supplies)


def _found(rows: Rows, phase: str, load: str, share: float) -> float | None:
    """Generations a second of a load's good run of a phase; None without one."""
    for row in rows:
        if row["phase"] == phase and (row["load"], row["share"]) == (load, share) and not (row["error"] or row["warm"]):
            return float(row["per_s"])
    return None
