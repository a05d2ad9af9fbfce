"""`countersign bench chaos`: kill everything at random while clients ask, then see whether anything is missing."""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import values
from benchmarks.chaos import report
from benchmarks.chaos.stage import Outcome, Scene, Stage
from benchmarks.harness import machine
from policies.errors import CountersignError

KILLS_PER_SECOND = 3.4


def main(argv: Sequence[str]) -> int:
    """Run it; 1 when anything was lost, counted twice or judged wrongly, or not settled. Raises CountersignError.

    With `everysec` losses are what is shown, and no failure.
    """
    arguments = parser().parse_args(list(argv))
    scene = scene_of(arguments)
    started, clock = datetime.now(UTC), time.monotonic()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="cs-chaos-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        report.prepare(arguments.output)
    except OSError as error:
        raise CountersignError(f"bench chaos: {error.filename}: {error.strerror}") from error
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
        models=tuple(dict.fromkeys(arguments.models)),
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
    made.add_argument("--seconds", type=values.duration, default=60.0, help="how long clients ask and processes die")
    made.add_argument("--minutes", type=values.duration, help="the same in minutes")
    made.add_argument("--kills", type=values.natural, help=f"blows in all (default {KILLS_PER_SECOND} a second)")
    made.add_argument("--settle", type=values.duration, default=90.0, help="seconds in which every verdict must come")
    made.add_argument("--proxies", type=values.count, default=2)
    made.add_argument("--workers", type=values.count, default=3)
    made.add_argument("--references", type=values.count, default=2, help="reference processes per model")
    made.add_argument("--models", nargs="+", type=_model, default=["toy"], help="toy, toy-1, toy-2, …")
    made.add_argument("--clients", type=values.count, default=10)
    made.add_argument("--fsync", choices=("always", "everysec"), default="always", help="of the append-only file")
    made.add_argument("--power", action="store_true", help="with everysec: Redis's machine loses power, simulated")
    made.add_argument("--engine", type=_folder, help="a model's folder: replay on real vLLM engines, and kill those")
    made.add_argument("--seed", type=values.natural, default=1)
    return made


def _model(text: str) -> str:
    if re.fullmatch(r"toy(-[1-9][0-9]{0,3})?", text) is None:
        raise argparse.ArgumentTypeError(f"expected toy, toy-1, toy-2, …, not {text!r}")
    return text


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"expected a model's folder, not {text!r}")
    return Path(text)


def _say(text: str) -> None:
    print(f"bench chaos: {text}", file=sys.stderr, flush=True)
