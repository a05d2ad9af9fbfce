"""From options to rows."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.announced import Announced
from benchmarks.harness.metadata import FILE, Metadata
from benchmarks.harness.progress import Bar, Clock
from benchmarks.harness.rows import Row, Rows
from benchmarks.harness.usage import Gpu
from benchmarks.overhead import steps, witness
from benchmarks.overhead.answer import Script
from benchmarks.overhead.asking import Asking
from benchmarks.overhead.backend import SCRIPTED, Backend, chosen, environment, key, longest
from benchmarks.overhead.cells import Cell
from benchmarks.overhead.command import BENCH, witness_cell
from benchmarks.overhead.measure import Bench
from benchmarks.overhead.report import ROWS
from benchmarks.overhead.stack import KEPT, PROFILE, Stack
from benchmarks.overhead.steps import BYTES, Step
from benchmarks.overhead.upstream import precise_loop
from policies.errors import CountersignError

SAME = (
    *("reference", "endpoint", "temperature", "full", "calibrate", "workers", "seed", "first", "gap"),
    *("threads", "serve"),
)
"""Options that must be the same in all runs of a folder."""


def measure(options: argparse.Namespace, planned: Sequence[Step], began: str, load: float) -> bool:
    """Take the steps that have no row yet; whether all of them have one now. Raises CountersignError."""
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    if not options.resume:
        for name in (ROWS, FILE, PROFILE):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / KEPT, ignore_errors=True)
    backend = chosen(options)
    rows = Rows(folder / ROWS)
    clock, bar = Clock(options.time_limit), Bar(BENCH)
    todo = steps.left(planned, steps.done(list(rows)))
    if not todo and not _waiting(options, list(rows)):
        return True
    metadata = Metadata(folder / FILE, BENCH, _what(options, backend), _shown(options), began=began, load=load)
    bar.say(f"starting everything; {len(todo)} of {len(planned)} steps to go")
    with Stack(options, backend, bar.say) as stack, Gpu() as gpu:
        metadata.note(ready_s=round(clock.elapsed, 1))
        bar.say(f"ready after {clock.elapsed:.0f} s; warming up")
        with asyncio.Runner(loop_factory=precise_loop) as runner:
            complete = runner.run(_measured(options, stack, gpu, planned, todo, rows, clock, bar))
    metadata.end(clock.elapsed)
    return complete


async def _measured(
    options: argparse.Namespace,
    stack: Stack,
    gpu: Gpu,
    planned: Sequence[Step],
    todo: Sequence[Step],
    rows: Rows,
    clock: Clock,
    bar: Bar,
) -> bool:
    arms = list(dict.fromkeys(step.arm for step in planned))
    async with Announced(stack.redis_url) as announced:
        bench = _bench(options, stack, announced, gpu)
        await bench.warm_up(arms, options.mix)
        await _bytes(options, bench, rows, stack.backend, arms)
        complete = await _steps(options, stack, bench, todo, rows, clock, bar)
        if options.witness and complete:
            complete = await _witness(options, stack, bench, rows, clock, bar)
    return complete


async def _steps(
    options: argparse.Namespace,
    stack: Stack,
    bench: Bench,
    todo: Sequence[Step],
    rows: Rows,
    clock: Clock,
    bar: Bar,
) -> bool:
    audit: float | None = None
    complete = True
    for place, step in enumerate(todo):
        kind = f"{step.arm} {step.cell.name}"
        if not clock.fits(kind, 1):
            return False
        if step.audit != audit:
            audit = step.audit
            await asyncio.to_thread(stack.audit, audit)
        bar.show(str(step), place, len(todo), _left(clock, todo[place:]))
        try:
            row = await bench.step(step)
        except Exception as error:
            rows.append(step.broken(error))
            if isinstance(error, CountersignError):
                raise
            bar.say(f"{step} broke off: {error}")
            complete = False
            continue
        clock.learn(kind, 1, row["seconds"])
        rows.append(row)
    bar.show("measured", len(todo), len(todo), None, last=True)
    return complete


def _left(clock: Clock, todo: Sequence[Step]) -> float | None:
    work: dict[str, float] = {}
    for step in todo:
        kind = f"{step.arm} {step.cell.name}"
        work[kind] = work.get(kind, 0.0) + 1
    return clock.left(work)


async def _bytes(options: argparse.Namespace, bench: Bench, rows: Rows, backend: Backend, arms: Sequence[str]) -> None:
    """Count bytes, once per arm and mix. Not of a backend over TLS, in which nobody can look."""
    known = {(row["arm"], row["mix"]) for row in rows if row["what"] == BYTES and not row["error"]}
    if backend.url.startswith("https:"):
        return
    for mix in options.mix:
        for arm in dict.fromkeys(arms):
            if (arm, mix.name) not in known:
                rows.append(await bench.bytes(arm, mix))


async def _witness(options: argparse.Namespace, stack: Stack, bench: Bench, rows: Rows, clock: Clock, bar: Bar) -> bool:
    cell, backend = witness_cell(options), stack.backend
    if backend.folder is None:
        raise CountersignError("bench overhead: --witness needs the model's folder, for its tokenizer: --folder")
    planned = _waiting(options, list(rows))
    audit = options.audit[0]
    await asyncio.to_thread(stack.audit, audit)
    bar.say("starting vllm bench serve")
    environ = {**os.environ, **environment(options), "OPENAI_API_KEY": key() or "none"}
    with witness.Witness(stack.folder, environ) as tool:
        for place, run in enumerate(planned):
            if not clock.fits(run.tool, 1):
                return False
            bar.show(
                f"witness: {run.tool}, {run.arm}", place, len(planned), clock.left({run.tool: len(planned) - place})
            )
            began = clock.elapsed
            try:
                rows.append(await _heard(options, stack, bench, tool, run, cell, audit))
            except Exception as error:
                rows.append(witness.broken(run, error))
                raise
            clock.learn(run.tool, 1, clock.elapsed - began)
    return True


async def _heard(
    options: argparse.Namespace,
    stack: Stack,
    bench: Bench,
    tool: witness.Witness,
    run: witness.Run,
    cell: Cell,
    audit: float,
) -> Row:
    if run.tool == witness.OURS:
        return witness.row_of_ours(run, await bench.step(witness.step(run, cell, audit)))
    assert stack.backend.folder is not None
    place = run.arm if run.arm in (steps.DIRECT, steps.PLAIN) else "proxy"
    words = witness.command(
        run,
        cell,
        url=stack.urls[place],
        endpoint=options.endpoint,
        model=stack.backend.model,
        tokenizer=stack.backend.folder,
        temperature=options.temperature,
        seed=options.seed,
    )
    row = await asyncio.to_thread(tool.run, run, words)
    await bench.settle(run.arm)
    return row


def _waiting(options: argparse.Namespace, rows: Sequence[Row]) -> list[witness.Run]:
    """Runs of the witness that have no row."""
    known = witness.done(rows)
    planned = witness.runs(options.witness_arms, options.witness, options.seed)
    return [run for run in planned if run.key not in known]


def _bench(options: argparse.Namespace, stack: Stack, announced: Announced, gpu: Gpu) -> Bench:
    backend = stack.backend
    if options.endpoint == "completions" and not backend.vocabulary:
        raise CountersignError("bench overhead: --endpoint completions needs the model's folder: --folder")
    asking = Asking(
        backend.model,
        options.endpoint,
        backend.vocabulary,
        options.temperature,
        key() if backend.kind == "url" else "",
    )
    script = Script(longest(options)) if backend.kind == SCRIPTED else None
    return Bench(stack, asking, announced, gpu, script=script, seed=options.seed, timeout=options.timeout)


def _what(options: argparse.Namespace, backend: Backend) -> dict[str, Any]:
    kept = {name: getattr(options, name) for name in SAME}
    kept["profile"] = None if options.profile is None else options.profile.name
    model = backend.model if backend.folder is None else backend.folder.name
    return kept | {"backend": backend.kind, "model": model, "runtime": backend.runtime, "engine": options.engine}


def _shown(options: argparse.Namespace) -> dict[str, Any]:
    """The options as they go into the metadata: no folders of this machine, no addresses of servers."""
    shown = {name: value for name, value in vars(options).items() if name not in ("output", "dry_run", "relay_only")}
    shown["mix"] = [mix.name for mix in options.mix]
    shown["url"] = "given" if options.url else None
    if str(options.reference).startswith("http"):
        shown["reference"] = "given"
    found: dict[str, Any] = {name: _plain(value) for name, value in shown.items()}
    return found


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Path) else value
