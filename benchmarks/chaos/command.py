"""`countersign bench chaos`: kill everything at random while clients ask, then see whether anything is missing."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.chaos import report
from benchmarks.chaos.stage import Outcome, Scene, Stage
from benchmarks.overhead import machine

KILLS_PER_SECOND = 3.4


def main(argv: Sequence[str]) -> int:
    """Run it; 1 when anything was lost, counted twice or judged wrongly, or not settled. Raises CountersignError.

    With `everysec` losses are what is shown, and no failure.
    """
    arguments = parser().parse_args(list(argv))
    scene = scene_of(arguments)
    started, clock = datetime.now(UTC), time.monotonic()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="cs-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    outcome = asyncio.run(_staged(scene, folder))
    metadata = {
        "benchmark": "chaos",
        "started": started.strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": round(time.monotonic() - clock, 1),
        "machine": machine.describe(),
    }
    print(report.write(outcome, metadata, arguments.output))
    _say(f"logs are in {folder}; written to {arguments.output}.md and .jsonl")
    ledger = outcome.ledger
    failed = ledger.lost or ledger.duplicates or ledger.wrong or outcome.settled_after is None
    return 1 if failed and scene.fsync == "always" else 0


async def _staged(scene: Scene, folder: Path) -> Outcome:
    """Play it; SIGTERM ends everything that runs."""
    playing = asyncio.ensure_future(Stage(scene, folder, _say).run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, playing.cancel)
    try:
        return await playing
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


def scene_of(arguments: argparse.Namespace) -> Scene:
    """What the arguments ask for."""
    seconds = arguments.minutes * 60 if arguments.minutes else arguments.seconds
    kills = arguments.kills if arguments.kills is not None else round(seconds * KILLS_PER_SECOND)
    return Scene(
        proxies=arguments.proxies,
        workers=arguments.workers,
        references=arguments.references,
        models=tuple(arguments.models),
        clients=arguments.clients,
        kills=kills,
        seconds=seconds,
        settle=arguments.settle,
        fsync=arguments.fsync,
        power=arguments.power,
        engine=str(arguments.engine.resolve()) if arguments.engine else "",
        seed=arguments.seed,
    )


def parser() -> argparse.ArgumentParser:
    """Of the arguments."""
    made = argparse.ArgumentParser(prog="countersign bench chaos", description=__doc__)
    made.add_argument("--output", type=Path, default=Path("benchmarks/results/chaos"), help="without its suffix")
    made.add_argument("--keep", type=Path, help="folder for logs and Redis's file (default: a temporary one)")
    made.add_argument("--seconds", type=float, default=60.0, help="how long clients ask and processes die")
    made.add_argument("--minutes", type=float, help="the same in minutes")
    made.add_argument("--kills", type=int, help=f"blows in all (default {KILLS_PER_SECOND} a second)")
    made.add_argument("--settle", type=float, default=90.0, help="seconds in which every verdict must come")
    made.add_argument("--proxies", type=int, default=2)
    made.add_argument("--workers", type=int, default=3)
    made.add_argument("--references", type=int, default=2, help="reference processes per model")
    made.add_argument("--models", nargs="+", default=["toy"], help="toy, toy-1, toy-2, …")
    made.add_argument("--clients", type=int, default=10)
    made.add_argument("--fsync", choices=("always", "everysec"), default="always", help="of the append-only file")
    made.add_argument("--power", action="store_true", help="with everysec: Redis's machine loses power, simulated")
    made.add_argument("--engine", type=Path, help="a model's folder: replay on real vLLM engines, and kill those")
    made.add_argument("--seed", type=int, default=1)
    return made


def _say(text: str) -> None:
    print(f"bench chaos: {text}", file=sys.stderr, flush=True)
