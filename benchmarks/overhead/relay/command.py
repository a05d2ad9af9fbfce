"""`countersign bench overhead --relay-only`: starts everything, measures, writes the result, stops everything."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import values
from benchmarks.harness import machine
from benchmarks.overhead.answer import Ask, Script
from benchmarks.overhead.relay import report
from benchmarks.overhead.relay.loads import LOADS, WARM
from benchmarks.overhead.relay.measure import Bench, Burst
from benchmarks.overhead.relay.stack import RelayStack, litellm_version
from benchmarks.overhead.upstream import precise_loop
from policies.errors import CountersignError

_PACKAGES = ("countersign", "uvicorn", "uvloop", "httptools", "aiohttp")


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 1 when any request through the proxy failed. Raises CountersignError when a process does not
    start, or the machine is busy and `--busy` does not say that this is all right.
    """
    arguments = parser().parse_args(list(argv))
    if arguments.render:
        print(report.render(arguments.output))
        return 0
    signal.signal(signal.SIGTERM, _terminated)
    load = machine.load()
    if machine.is_busy(load) and not arguments.busy:
        raise CountersignError(f"this machine is busy (load {load:.2f}); wait, or mark the result with --busy")
    metadata, bursts = _measure(arguments, load)
    print(report.write(metadata, bursts, arguments.output))
    print(f"written to {arguments.output}.md and .jsonl", file=sys.stderr)
    return 1 if any(burst.errors for burst in bursts if burst.arm != "litellm") else 0


def parser() -> argparse.ArgumentParser:
    """Of the arguments."""
    made = argparse.ArgumentParser(prog=report.COMMAND, description=__doc__)
    made.add_argument("--relay-only", action="store_true", help=argparse.SUPPRESS)
    made.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/overhead/relay"), help="without its suffix"
    )
    made.add_argument("--rounds", type=values.count, default=7)
    made.add_argument("--streams", type=int, choices=sorted(LOADS), nargs="+", default=sorted(LOADS), help="at once")
    made.add_argument("--litellm", metavar="COMMAND", help="path of LiteLLM's `litellm`, to be measured beside")
    made.add_argument("--seed", type=values.natural, default=1, help="of the order of bursts and of arrivals")
    made.add_argument("--busy", action="store_true", help="measure although others use this machine, and say so")
    made.add_argument("--render", action="store_true", help="measure nothing: make the page from its lines again")
    return made


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


def _measure(arguments: argparse.Namespace, load: float) -> tuple[dict[str, Any], list[Burst]]:
    described = machine.describe()
    versions = {name: described["packages"][name] for name in _PACKAGES if name in described["packages"]}
    if arguments.litellm:
        versions["litellm"] = litellm_version(arguments.litellm)
    started, clock = datetime.now(UTC), time.monotonic()
    loads = [LOADS[streams] for streams in sorted(set(arguments.streams))]
    if 1 in arguments.streams:
        loads.append(WARM)
    tokens = max(each.tokens for each in loads)
    _say("starting backend, proxy and others")
    with RelayStack(tokens, arguments.litellm) as stack:
        bench = Bench(stack, loads, seed=arguments.seed)
        with asyncio.Runner(loop_factory=precise_loop) as runner:
            runner.run(_run(bench, arguments.rounds))
        cores = asdict(stack.cores)
    metadata = {
        "benchmark": "overhead --relay-only",
        "command": command(arguments),
        "started": started.strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": round(time.monotonic() - clock, 1),
        "rounds": arguments.rounds,
        "load_before": round(load, 2),
        "busy": machine.is_busy(load),
        "chunk_bytes": _chunk_bytes(tokens),
        "cores": cores,
        "versions": versions,
        "machine": {key: value for key, value in described.items() if key != "packages"},
    }
    return metadata, bench.bursts


def _chunk_bytes(tokens: int) -> int:
    script, ask = Script(tokens), Ask(tokens, True, True)
    return round(sum(len(script.token(ask, index)) for index in range(tokens)) / tokens)


async def _run(bench: Bench, rounds: int) -> None:
    _say("warming up")
    await bench.warm_up()
    for number in range(1, rounds + 1):
        _say(f"round {number} of {rounds}")
        await bench.round(number)


def _terminated(signum: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + signum)


def _say(text: str) -> None:
    print(f"bench overhead: {text}", file=sys.stderr, flush=True)
