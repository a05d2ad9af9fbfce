"""`countersign bench overhead`: what a request costs straight to a backend, through the proxy, and verified.

The backend is a script with exact timing (the default), a server at --url, or a vLLM server that is started here.
Everything else is started here too: Valkey, proxy, workers and, with --reference engine, the engine that replays. Every
step is a row in `rows.jsonl` of the output folder; steps that have their row are not taken again.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import values
from benchmarks.demo import servers
from benchmarks.harness import config, machine
from benchmarks.harness.plan import Plan
from benchmarks.overhead import steps
from benchmarks.overhead.asking import PATHS
from benchmarks.overhead.backend import SCRIPTED, SERVED
from benchmarks.overhead.cells import Cell, cells, mixes
from benchmarks.overhead.layout import FEWEST_ANSWERS
from benchmarks.overhead.report import ROWS, read_rows, remake
from benchmarks.overhead.witness import WITNESS, runs
from policies.errors import CountersignError

BENCH = "overhead"
PAUSE = 0.1
"""Seconds between two steps, for an estimate."""
START = {SCRIPTED: 5.0, SERVED: 60.0, "url": 5.0}
"""Seconds until everything runs, for an estimate; an engine that replays takes as long as a server again."""
ENGINES = 2
"""That share a CPU: one that answers and one that replays. With threads that wait for each other's cores both crawl."""
WITNESS_RUN = 4.0
"""Seconds that a run of vLLM's tool takes besides its requests."""


def main(argv: Sequence[str]) -> int:
    """Measure what is missing and write the report; 1 when any request failed. Raises CountersignError."""
    if "--relay-only" in argv:
        from benchmarks.overhead.relay import command as relay

        return relay.main(argv)
    options = config.parse(parser(), BENCH, argv)
    planned = planned_steps(options)
    if options.dry_run:
        print(dry_run(options, planned).text())
        return 0
    signal.signal(signal.SIGTERM, _terminated)
    load = machine.load()
    machine.refuse_busy(load, options.busy)
    from benchmarks.overhead.run import measure

    complete = measure(options, planned, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), load)
    text, failed = remake(options.output, plots=not options.no_plots)
    print(f"\n{text}")
    if not complete:
        print("not everything is measured; the same command goes on", file=sys.stderr)
    print(f"written to {options.output}", file=sys.stderr)
    return 1 if failed else 0


def planned_cells(options: argparse.Namespace) -> list[Cell]:
    """Every kind of load that the options ask for. Raises CountersignError where there is none."""
    found = list(
        cells(
            options.mix,
            closed=options.closed,
            rates=options.rate,
            bursts=options.burst,
            requests=options.requests,
            arrivals=options.arrivals,
            repeats=options.bursts,
            first=options.first,
            gap=options.gap,
        )
    )
    if not found:
        raise CountersignError("bench overhead: no load: give --closed, --rate or --burst")
    return found


def planned_steps(options: argparse.Namespace) -> list[steps.Step]:
    """Every step, in its order. Raises CountersignError for what cannot be measured."""
    arms = [arm for arm in steps.ARMS if arm in {steps.DIRECT, *options.arms}]
    if any(options.audit) and options.reference == "none":
        raise CountersignError("bench overhead: --audit above 0 needs a --reference that replays")
    if options.calibrate and options.reference == "none":
        raise CountersignError("bench overhead: --calibrate needs a --reference that replays")
    if 0 < options.calibrate < FEWEST_ANSWERS:
        raise CountersignError(f"bench overhead: --calibrate needs {FEWEST_ANSWERS} answers at least, to fit anything")
    return steps.steps(planned_cells(options), arms, options.audit, rounds=options.rounds, seed=options.seed)


def dry_run(options: argparse.Namespace, planned: Sequence[steps.Step]) -> Plan:
    """What would be run."""
    rows = read_rows(options.output) if options.resume and (options.output / ROWS).exists() else []
    todo = steps.left(planned, steps.done(rows))
    kind = "url" if options.url else options.backend
    each = options.startup or START[kind]
    start = each * (2 if options.reference == "engine" else 1)
    if options.calibrate and not (options.output / "profile.json").exists():
        start += each + 2 * options.calibrate * (options.first + options.gap * options.mix[0].mean_answer) / 2
    seconds = start + steps.seconds(todo, rows, options.first, options.gap, PAUSE)
    about = config.about(BENCH, options.config)
    lines = [
        [cell.title, str(cell.requests), str(cell.repeats), f"{cell.seconds(options.first, options.gap):.1f}"]
        for cell in planned_cells(options)
    ]
    order = [str(step) for step in planned]
    if options.witness:
        cell = witness_cell(options)
        each = runs(options.witness_arms, options.witness, options.seed)
        order += [f"witness, round {run.round}: {run.tool}, {run.arm}" for run in each]
        seconds += len(each) * (WITNESS_RUN + cell.seconds(options.first, options.gap))
    return Plan(
        f"bench overhead, to {options.output}",
        [arm for arm in steps.ARMS if any(step.arm == arm for step in planned)],
        [["load", "requests a step", "steps per arm and round", "seconds a step, about"], *lines],
        order,
        done=len(planned) - len(todo),
        seconds=seconds,
        basis=f"first tokens after {options.first:g} s, others every {options.gap:g} s; the start {start:.0f} s",
        facts=[
            *([about] if about else []),
            f"Backend: {options.url or options.backend}{f' {options.model}' if options.model else ''}; "
            f"reference: {options.reference}; audits: {', '.join(f'{rate:.0%}' for rate in options.audit)}.",
        ],
    )


def witness_cell(options: argparse.Namespace) -> Cell:
    """The load on which the witness is heard: the first closed loop with the first mix."""
    found = next((cell for cell in planned_cells(options) if cell.kind == "closed"), None)
    if found is None:
        raise CountersignError(f"bench overhead: --{WITNESS} needs a closed loop: --closed")
    return dataclasses.replace(found, requests=round(found.at) * options.witness_requests)


def _terminated(signum: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + signum)


def parser() -> argparse.ArgumentParser:
    """Of the options."""
    made = argparse.ArgumentParser(
        prog="countersign bench overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    config.add_arguments(made, BENCH)
    made.add_argument("--output", type=Path, default=Path("benchmarks/results/overhead/scripted"), metavar="DIR")
    made.add_argument("--relay-only", action="store_true", help="`countersign bench relay`, which has its own --help")
    asked = made.add_argument_group("who is asked")
    asked.add_argument("--backend", choices=(SCRIPTED, SERVED), default=SCRIPTED)
    asked.add_argument("--url", help="an OpenAI-compatible server; its key in $COUNTERSIGN_BENCH_KEY")
    asked.add_argument("--model", help="its model (default: the first it lists); of vllm, a folder, smollm2 or shape:…")
    asked.add_argument("--folder", type=Path, help="of the model of --url, for exact lengths and checks of texts")
    asked.add_argument("--runtime", default="", help="its sampling noise, as in countersign.yaml")
    asked.add_argument("--profile", type=Path, help="calibrated nulls, without which nothing passes")
    asked.add_argument(
        "--calibrate", type=values.natural, default=0, metavar="N", help="make that profile first, of so many answers"
    )
    asked.add_argument("--reference", default="none", help="what replays: none, same (the backend), engine, or a URL")
    asked.add_argument("--engine", type=values.arguments, default={}, help="arguments of that engine, as JSON")
    asked.add_argument("--serve", type=values.arguments, default={}, help="more flags of the vLLM server, as JSON")
    asked.add_argument("--max-model-len", type=values.count, default=2048)
    asked.add_argument("--gpu-share", type=values.share, default=0.45, help="of the GPU's memory, for the server")
    asked.add_argument(
        "--threads",
        type=values.count,
        default=servers.threads(ENGINES),
        help="of each engine on a CPU; by default half",
    )
    asked.add_argument("--workers", type=values.count, default=1, help="CPU worker processes")
    load = made.add_argument_group("what is asked")
    load.add_argument("--arms", nargs="+", choices=steps.ARMS[1:], default=list(steps.ARMS[1:]))
    load.add_argument("--full", type=values.part, default=0.25, help="share of replays with a top 20 of their own")
    load.add_argument("--audit", type=values.part, nargs="+", default=[0.0], help="shares of answers that are replayed")
    load.add_argument("--endpoint", choices=PATHS, default="chat")
    load.add_argument("--temperature", type=values.seconds, default=0.0)
    load.add_argument("--mix", type=mixes, nargs="+", default=[mixes("32/64")], metavar="PROMPT/ANSWER[+…]")
    load.add_argument("--closed", type=values.count, nargs="*", default=[], help="clients of closed loops")
    load.add_argument("--rate", type=values.duration, nargs="*", default=[], help="Poisson arrivals a second")
    load.add_argument("--burst", type=values.count, nargs="*", default=[], help="streams that begin together")
    load.add_argument("--requests", type=values.count, default=8, help="of each client of a closed loop, per step")
    load.add_argument("--arrivals", type=values.count, default=40, help="Poisson arrivals of a step")
    load.add_argument("--bursts", type=values.count, default=4, help="per arm and round")
    how = made.add_argument_group("how")
    how.add_argument("--rounds", type=values.count, default=7)
    how.add_argument("--witness", type=values.natural, default=0, metavar="ROUNDS", help="of `vllm bench serve`")
    how.add_argument("--witness-requests", type=values.count, default=8, help="of each of its clients, per run")
    how.add_argument("--witness-arms", nargs="+", choices=steps.ARMS, default=[steps.DIRECT, steps.ASYNC])
    how.add_argument("--first", type=values.duration, default=0.02, help="seconds to a first token: the script's")
    how.add_argument("--gap", type=values.duration, default=0.01, help="and between others; else an estimate")
    how.add_argument("--startup", type=values.seconds, default=0.0, help="seconds that an engine takes to start")
    how.add_argument("--seed", type=values.natural, default=1, help="of order, prompts, lengths and arrivals")
    how.add_argument("--timeout", type=values.duration, default=120.0, help="seconds that a request may take")
    how.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="go on from the rows")
    how.add_argument("--time-limit", type=values.seconds, default=0.0, help="seconds after which no step begins")
    how.add_argument("--busy", action="store_true", help="measure although others use this machine, and say so")
    how.add_argument("--no-plots", action="store_true", help="tables only; needs no matplotlib")
    return made
