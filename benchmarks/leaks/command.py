"""`countersign bench leaks`: clients and failures of every kind for minutes; then what is left is counted."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import orjson

from benchmarks import values
from benchmarks.harness import machine
from benchmarks.leaks import report
from benchmarks.leaks.stage import Outcome, Scene, Stage


def main(argv: Sequence[str]) -> int:
    """Run it; 1 when anything is left over. Raises CountersignError when a process does not start or ends."""
    arguments = parser().parse_args(list(argv))
    if arguments.render:
        print(report.render(arguments.output))
        return 0
    trace = arguments.trace if arguments.trace is not None else min(120.0, arguments.minutes * 12)
    scene = Scene(arguments.minutes * 60, arguments.clients, arguments.redis_every, trace, arguments.seed)
    started = datetime.now(UTC)
    outcome = asyncio.run(_staged(scene))
    metadata = {
        "benchmark": "leaks",
        "command": command(arguments),
        "started": started.strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine.describe(),
    }
    print(report.write(outcome, metadata, arguments.output))
    lines = [orjson.loads(line) for line in arguments.output.with_suffix(".jsonl").read_bytes().splitlines()]
    return 1 if report.leaks(lines) else 0


async def _staged(scene: Scene) -> Outcome:
    """Play it; SIGTERM ends everything that runs."""
    playing = asyncio.ensure_future(Stage(scene, _say).play())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, playing.cancel)
    try:
        return await playing
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


def parser() -> argparse.ArgumentParser:
    """Of the arguments."""
    made = argparse.ArgumentParser(prog="countersign bench leaks", description=__doc__)
    made.add_argument("--output", type=Path, default=Path("benchmarks/results/leaks"), help="without its suffix")
    made.add_argument("--minutes", type=values.duration, default=10.0, help="how long clients come")
    made.add_argument("--clients", type=values.count, default=48, help="at once")
    made.add_argument("--redis-every", type=values.seconds, default=45.0, help="seconds between its deaths; 0 is never")
    made.add_argument("--trace", type=values.seconds, help="seconds of tracing memory after that; default up to 120")
    made.add_argument("--seed", type=values.natural, default=1)
    made.add_argument("--render", action="store_true", help="run nothing: make the page from its lines again")
    return made


def command(arguments: argparse.Namespace) -> str:
    """What was asked."""
    words = ["countersign bench leaks"]
    words += [
        f"--{name.replace('_', '-')} {getattr(arguments, name):g}"
        for name in ("minutes", "clients", "redis_every", "trace", "seed")
        if getattr(arguments, name) != parser().get_default(name)
    ]
    return " ".join(words)


def _say(text: str) -> None:
    print(f"bench leaks: {text}", file=sys.stderr, flush=True)
