"""From options to rows: starts the engine for grid and loads, then the pool."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cost import shape
from benchmarks.cost.arms import BACKEND, MODEL, Arms
from benchmarks.cost.claims import FILE, Claims, grid_name, load_name
from benchmarks.cost.feeding import Feeder
from benchmarks.cost.grid import run_grid
from benchmarks.cost.load import Loads, load_turns
from benchmarks.cost.metadata import Metadata
from benchmarks.cost.plan import IDS, WORKER, Load, left, plan
from benchmarks.cost.pool import CAPACITY, LATENCY, LEVELS, QUEUEING, Phases, Supply
from benchmarks.cost.progress import Bar, Clock
from benchmarks.cost.rows import GRID, LOAD, POOL, Rows, done, read
from benchmarks.cost.stack import Pool
from benchmarks.cost.usage import Gpu
from policies import distance, margin
from policies.errors import CountersignError, ProfileError
from policies.profile import ProfileKey, fit
from policies.settings import ReferenceSettings

PROFILE = "profile.json"
PRECISION = "bf16"
_UNFED = "--pool feeds what --load's workers answered: run --load with its arm `worker` first, or together"
SHARES = (0.0, 0.25)
"""Shares of audits whose replay takes the reference's own top 20 too: none, and the default."""


def measure(options: argparse.Namespace, arms: Sequence[str], began: str) -> bool:
    """Run what has no row yet; whether everything is measured now.

    Raises:
        CountersignError: the folder holds rows of another model or engine, something does not start, or nothing is
            asked for.
    """
    folder: Path = options.output_dir
    if not (arms and _cells(options)) and not (options.load and options.load_arms) and not options.pool:
        raise CountersignError("nothing is left to measure: no cell or arm of the grid, no load, no pool")
    if not options.resume:
        for name in (GRID, LOAD, POOL, FILE, PROFILE, "metadata.json"):
            (folder / name).unlink(missing_ok=True)
    if options.pool and not (options.load and WORKER in options.load_arms) and not _supplies(options):
        raise CountersignError(_UNFED)
    settings = reference_settings(options, _model(options))
    metadata = Metadata(folder / "metadata.json", options, settings, began)
    clock, bar = Clock(options.time_limit), Bar()
    complete = _engine_part(options, arms, settings, metadata, clock, bar)
    if options.pool and clock.fits("pool", 0):
        complete = asyncio.run(_pool_part(options, settings, metadata, clock, bar)) and complete
    metadata.end(clock.elapsed)
    return complete


def _model(options: argparse.Namespace) -> str:
    """The model's folder. One that is made or fetched is always at the same place, which vLLM's caches hang on."""
    given = str(options.model)
    ours = Path(tempfile.gettempdir()) / f"countersign-shapes-{os.getuid()}"
    if given.startswith(shape.PREFIX):
        name = given.removeprefix(shape.PREFIX)
        if name not in shape.SHAPES:
            raise CountersignError(f"--model {given}: no such shape; there are {', '.join(shape.SHAPES)}")
        options.load_format = "dummy"
        return str(shape.make(ours / name, name))
    return given if Path(given).is_dir() else str(_fetched(given, ours / "hub"))


def _fetched(name: str, folder: Path) -> Path:
    """A model by the hub's name, as LMCV's `--model` takes it: from the hub's cache, or downloaded into it."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = huggingface_hub.snapshot_download(name)
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = f"neither a model folder nor a model that the hub gives ({type(error).__name__})"
        raise CountersignError(f"--model {name}: {reason}") from error
    link = folder / name.rpartition("/")[2]  # a snapshot's own folder is named by a hash
    folder.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(found)
    return link


def _cells(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Lengths of the cells that `--max-total-tokens` leaves."""
    most = options.max_total_tokens or math.inf
    cells = itertools.product(options.input_lengths, options.output_lengths)
    return [cell for cell in cells if sum(cell) <= most]


def reference_settings(options: argparse.Namespace, model: str) -> ReferenceSettings:
    """The one engine of all arms, as `countersign.yaml` would have it."""
    cells = _cells(options) or [(max(options.input_lengths), max(options.output_lengths))]
    at_load = [each for load in options.load for each in load.requests]
    needed = max(map(sum, [*(cells if options.arms else []), *at_load]), default=0) + 1
    if options.max_model_len and options.max_model_len < needed:
        raise CountersignError(
            f"--max-model-len {options.max_model_len}: the longest answer needs {needed}; --max-total-tokens leaves "
            "longer cells out"
        )
    engine: dict[str, Any] = {
        "dtype": options.dtype,
        "load_format": options.load_format,
        "max_model_len": options.max_model_len or max(map(sum, [*cells, *at_load])) + 1,
        "tensor_parallel_size": options.tensor_parallel_size,
        "trust_remote_code": options.trust_remote_code,
        # Nothing may be reused from an earlier run of the same cell.
        "enable_prefix_caching": False,
    }
    for name in ("quantization", "gpu_memory_utilization", "max_logprobs"):
        if (value := getattr(options, name)) is not None:
            engine[name] = value
    return ReferenceSettings(kind="vllm_engine", path=model, engine=engine | options.engine, timeout=600)


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
    tasks = plan(
        options.input_lengths,
        options.output_lengths,
        arms,
        repeats=options.repeats,
        seed=options.seed,
        max_total_tokens=options.max_total_tokens,
        worker_repeats=options.worker_repeats,
    )
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


async def _pool_part(
    options: argparse.Namespace, settings: ReferenceSettings, metadata: Metadata, clock: Clock, bar: Bar
) -> bool:
    folder: Path = options.output_dir
    claims, rows = Claims(folder / FILE), Rows(folder / POOL)
    supplies = _supplies(options)
    cells = sorted(
        (cell, claims[grid_name(cell)])
        for cell in {(row["input_len"], row["output_len"]) for row in read(folder / GRID)}
        if grid_name(cell) in claims and cell[1] <= max(options.output_lengths)
    )
    if not supplies:
        raise CountersignError(_UNFED)
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
                phases = Phases(
                    pool, feeder, gpu, rows, clock, bar, options.pool_seconds, share, options.seed, _known(rows)
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
            if not phases.clock.fits("phase", 1):
                complete = False
                continue
            count = _count(folder, supply, options.pool_seconds)
            await phases.capacity(supply, min(32, count), warm=True)
            row = await phases.capacity(supply, count)
            phases.clock.learn("phase", 1, row["seconds"])
            capacity = row["per_s"]
        if place or phases.share or not capacity:
            continue
        for level in LEVELS:
            if (QUEUEING, name, phases.share, level) in phases.known:
                continue
            if phases.clock.fits("phase", 1):
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
    from benchmarks.cost.plan import loads

    given = list(options.load) or loads(" ".join(dict.fromkeys(row["load"] for row in read(folder / LOAD))))
    # First the one with the most requests of one kind, whose capacity is steadiest.
    return sorted(given, key=lambda load: (len(set(load.requests)), -len(load.requests)))


def _supplies(options: argparse.Namespace) -> list[Supply]:
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


def _found(rows: Rows, phase: str, load: str, share: float) -> float | None:
    """Generations a second of a load's good run of a phase; None without one."""
    for row in rows:
        if row["phase"] == phase and (row["load"], row["share"]) == (load, share) and not (row["error"] or row["warm"]):
            return float(row["per_s"])
    return None
