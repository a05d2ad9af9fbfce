"""`countersign bench relay`: what the relay alone adds, from one stream to a thousand, beside another gateway.

Every burst is a row in `rows.jsonl` of the output folder; bursts that have their row are not measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import values
from benchmarks.harness import config, machine
from benchmarks.harness.metadata import FILE, Metadata
from benchmarks.harness.plan import Plan
from benchmarks.harness.progress import Bar, Clock
from benchmarks.harness.rows import Rows
from benchmarks.overhead.answer import Ask, Script
from benchmarks.overhead.relay import report
from benchmarks.overhead.relay.loads import LOADS, WARM, Load
from benchmarks.overhead.relay.measure import Bench, Turn, turns
from benchmarks.overhead.relay.stack import RelayStack, litellm_version
from benchmarks.overhead.upstream import precise_loop
from policies.errors import CountersignError

BENCH = "relay"
_PACKAGES = ("countersign", "uvicorn", "uvloop", "httptools", "aiohttp")
_SETTLING = 0.35
"""Seconds between two bursts, for an estimate."""
_START = 10.0


def main(argv: Sequence[str]) -> int:
    """Measure what is missing and write the report; 1 when any request through the proxy failed. Raises
    CountersignError when a process does not start, or the machine is busy and `--busy` does not say that this is all
    right.
    """
    arguments = config.parse(parser(), BENCH, argv)
    planned = planned_turns(arguments)
    if arguments.dry_run:
        print(plan(arguments, planned).text())
        return 0
    signal.signal(signal.SIGTERM, _terminated)
    load = machine.load()
    machine.refuse_busy(load, arguments.busy)
    complete = _measure(arguments, planned, load)
    print(report.remake(arguments.output, plots=not arguments.no_plots))
    if not complete:
        print("not everything is measured; the same command goes on", file=sys.stderr)
    print(f"written to {arguments.output}", file=sys.stderr)
    return 1 if any(burst.errors for burst in report.read(arguments.output) if burst.arm != "litellm") else 0


def parser() -> argparse.ArgumentParser:
    """Of the arguments."""
    made = argparse.ArgumentParser(
        prog=report.COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    config.add_arguments(made, BENCH)
    made.add_argument("--relay-only", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--output", type=Path, default=Path("benchmarks/results/relay"), metavar="DIR")
    made.add_argument("--rounds", type=values.count, default=7)
    made.add_argument("--streams", type=int, choices=sorted(LOADS), nargs="+", default=sorted(LOADS), help="at once")
    made.add_argument("--litellm", metavar="COMMAND", help="path of LiteLLM's `litellm`, to be measured beside")
    made.add_argument("--seed", type=values.natural, default=1, help="of the order of bursts and of arrivals")
    made.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="go on from the rows")
    made.add_argument("--time-limit", type=values.seconds, default=0.0, help="seconds after which no burst begins")
    made.add_argument("--busy", action="store_true", help="measure although others use this machine, and say so")
    made.add_argument("--no-plots", action="store_true", help="tables only; needs no matplotlib")
    return made


def loads_of(arguments: argparse.Namespace) -> list[Load]:
    """What every arm gets."""
    found = [LOADS[streams] for streams in sorted(set(arguments.streams))]
    return [*found, WARM] if 1 in arguments.streams else found


def planned_turns(arguments: argparse.Namespace) -> list[Turn]:
    """Every burst, in its order."""
    arms = ["direct", "floor", "proxy", *(["litellm"] if arguments.litellm else [])]
    return turns(loads_of(arguments), arms, range(1, arguments.rounds + 1), arguments.seed)


def plan(arguments: argparse.Namespace, planned: Sequence[Turn]) -> Plan:
    """What would be run."""
    todo = _left(arguments, planned)
    head = ["streams", "tokens each", "bursts per arm and round", "seconds a burst"]
    lines = [
        [str(load.streams), str(load.tokens), str(load.repeats), f"{load.seconds:.1f}"] for load in loads_of(arguments)
    ]
    return Plan(
        f"bench relay, to {arguments.output}",
        list(dict.fromkeys(turn.arm for turn in planned)),
        [head, *lines],
        [str(turn) for turn in planned],
        done=len(planned) - len(todo),
        seconds=_START + sum(turn.load.seconds + _SETTLING for turn in todo),
        basis="where nothing is late",
        facts=[text] if (text := config.about(BENCH, arguments.config)) else [],
    )


def command(arguments: argparse.Namespace) -> str:
    """What was asked, without paths of this machine."""
    words = [report.COMMAND]
    if arguments.rounds != 7:
        words.append(f"--rounds {arguments.rounds}")
    if arguments.streams != sorted(LOADS):
        words.append(f"--streams {' '.join(map(str, arguments.streams))}")
    if arguments.litellm:
        words.append("--litellm litellm")
    if arguments.seed != 1:
        words.append(f"--seed {arguments.seed}")
    return " ".join(words)


def _left(arguments: argparse.Namespace, planned: Sequence[Turn]) -> list[Turn]:
    known = set()
    if arguments.resume and (arguments.output / report.ROWS).exists():
        known = {burst.key for burst in report.read(arguments.output) if not burst.broken}
    return [turn for turn in planned if turn.key not in known]


def _measure(arguments: argparse.Namespace, planned: Sequence[Turn], load: float) -> bool:
    """Whether every burst has its row now."""
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    if not arguments.resume:
        for name in (report.ROWS, FILE):
            (folder / name).unlink(missing_ok=True)
    todo, tokens = _left(arguments, planned), max(each.tokens for each in loads_of(arguments))
    if not todo:
        return True
    metadata = _metadata(arguments, load, tokens)
    clock, bar = Clock(arguments.time_limit), Bar(BENCH)
    bar.say(f"starting backend, proxy and others; {len(todo)} of {len(planned)} bursts to go")
    with RelayStack(tokens, arguments.litellm) as stack:
        metadata.note(cores=asdict(stack.cores))
        with asyncio.Runner(loop_factory=precise_loop) as runner:
            complete = runner.run(_run(Bench(stack, seed=arguments.seed), todo, Rows(folder / report.ROWS), clock, bar))
    metadata.end(clock.elapsed)
    return complete


def _metadata(arguments: argparse.Namespace, load: float, tokens: int) -> Metadata:
    versions = machine.versions(_PACKAGES)
    if arguments.litellm:
        versions["litellm"] = litellm_version(arguments.litellm)
    metadata = Metadata(
        arguments.output / FILE,
        BENCH,
        {"seed": arguments.seed},
        _shown(arguments),
        began=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        load=load,
    )
    metadata.note(command=command(arguments), chunk_bytes=_chunk_bytes(tokens), versions=versions)
    return metadata


def _shown(arguments: argparse.Namespace) -> dict[str, Any]:
    shown = {name: value for name, value in vars(arguments).items() if name not in ("output", "dry_run", "relay_only")}
    return shown | {"litellm": os.path.basename(arguments.litellm) if arguments.litellm else None}


def _chunk_bytes(tokens: int) -> int:
    script, ask = Script(tokens), Ask(tokens, True, True)
    return round(sum(len(script.token(ask, index)) for index in range(tokens)) / tokens)


async def _run(bench: Bench, todo: Sequence[Turn], rows: Rows, clock: Clock, bar: Bar) -> bool:
    bar.say("warming up")
    await bench.warm_up()
    complete = True
    for place, turn in enumerate(todo):
        kind = f"{turn.arm} {turn.load.streams} {turn.load.warm}"
        if not clock.fits(kind, 1):
            return False
        bar.show(str(turn), place, len(todo), sum(each.load.seconds + _SETTLING for each in todo[place:]))
        began = clock.elapsed
        try:
            found = await bench.burst(turn)
        except Exception as error:
            rows.append(turn.broken(error).line())
            if isinstance(error, CountersignError):
                raise
            bar.say(f"{turn} broke off: {error}")
            complete = False
            continue
        clock.learn(kind, 1, clock.elapsed - began)
        rows.append(found.line())
    bar.show("measured", len(todo), len(todo), None, last=True)
    return complete


def _terminated(signum: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + signum)
