"""`countersign bench overhead`: starts everything, measures, writes the result, stops everything."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.overhead import machine
from benchmarks.overhead.answer import Script
from benchmarks.overhead.report import Result, write
from benchmarks.overhead.rounds import ARMS, Bench, Expectation, Load
from benchmarks.overhead.stack import Stack
from benchmarks.overhead.upstream import precise_loop

SHORT_TOKENS = 4
QUICK = {"rounds": 2, "requests": 4, "bursts": 1}
FULL = {"rounds": 7, "requests": 20, "bursts": 4}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 1 when any request failed. Raises CountersignError when a process does not start."""
    if "--relay-only" in argv:
        from benchmarks.overhead.relay import command as relay

        return relay.main(argv)
    arguments = _parser().parse_args(list(argv))
    for name, value in (QUICK if arguments.quick else FULL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    signal.signal(signal.SIGTERM, _terminated)
    result = _measure(arguments)
    text = write(result, arguments.output)
    print(f"\n{text}")
    print(f"written to {arguments.output}", file=sys.stderr)
    return 1 if result.errors else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="countersign bench overhead", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/overhead"), help="folder for the result"
    )
    parser.add_argument(
        "--relay-only", action="store_true", help="the relay alone, up to 1,000 streams; has its own --help"
    )
    parser.add_argument("--quick", action="store_true", help="a minute instead of ten; not to be quoted")
    parser.add_argument("--rounds", type=_positive, help="default 7")
    parser.add_argument("--requests", type=_positive, help="single requests per arm and round, default 20")
    parser.add_argument("--bursts", type=_positive, help="bursts of many streams per arm and round, default 4")
    parser.add_argument("--concurrency", type=_positive, nargs="+", default=[1, 32], help="streams at once")
    parser.add_argument("--arms", nargs="+", choices=ARMS[1:], default=list(ARMS[1:]), help="compared with direct")
    parser.add_argument("--tokens", type=_positive, default=64, help="tokens per answer")
    parser.add_argument("--first-ms", type=float, default=20.0, help="scripted time to the first token")
    parser.add_argument("--interval-ms", type=float, default=10.0, help="scripted time between tokens")
    parser.add_argument("--upstream", help="URL of a real vLLM instead of the script")
    parser.add_argument("--model", help="its served model; default the first it lists")
    parser.add_argument("--reference", help="URL of a vLLM server that replays every answer")
    parser.add_argument("--seed", type=int, default=1, help="of the order of bursts")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, not {value}")
    return value


def _terminated(signum: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + signum)


def _loads(arguments: argparse.Namespace) -> list[Load]:
    """Timed bursts, and short ones that tell the CPU of a chunk from that of a request."""
    duration = (arguments.first_ms + arguments.tokens * arguments.interval_ms) / 1000
    loads = []
    for concurrency in sorted(set(arguments.concurrency)):
        many = concurrency > 1
        # Arrivals within a quarter of an answer's length: not in step, yet all of them overlap.
        spread = duration / 4 if many else 0.0
        bursts = arguments.bursts if many else arguments.requests
        loads.append(Load(concurrency, arguments.tokens, bursts, spread))
        if arguments.tokens > SHORT_TOKENS:
            loads.append(Load(concurrency, SHORT_TOKENS, max(1, bursts // 2), spread))
    return loads


def _measure(arguments: argparse.Namespace) -> Result:
    load_before = machine.load()
    busy = machine.is_busy(load_before)
    if busy:
        _say(f"this machine is busy (load {load_before:.2f}); the result will be marked")
    started, clock = datetime.now(UTC), time.monotonic()
    script = [f"--tokens={arguments.tokens}", f"--first-ms={arguments.first_ms}"]
    script.append(f"--interval-ms={arguments.interval_ms}")
    _say("starting backend, proxy and worker")
    with Stack(
        upstream=arguments.upstream, model=arguments.model, reference=arguments.reference, script=script
    ) as stack:
        expect = Expectation(Script(arguments.tokens).text if stack.backend.scripted else None)
        arms = ["direct", *(arm for arm in ARMS[1:] if arm in arguments.arms)]
        bench = Bench(stack, arms, seed=arguments.seed, expect=expect)
        with asyncio.Runner(loop_factory=precise_loop) as runner:
            runner.run(_run(bench, arguments))
    metadata = {
        "benchmark": "overhead",
        "started": started.strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": round(time.monotonic() - clock, 1),
        "load_before": round(load_before, 2),
        "busy": busy,
        "arguments": {key: value for key, value in vars(arguments).items() if key != "output"},
        "machine": machine.describe(),
    }
    return Result(bench.rows, bench.costs, arguments.tokens, metadata)


async def _run(bench: Bench, arguments: argparse.Namespace) -> None:
    loads = _loads(arguments)
    _say("warming up")
    await bench.warm_up(loads)
    for number in range(1, arguments.rounds + 1):
        _say(f"round {number} of {arguments.rounds}")
        await bench.round(number, loads)


def _say(text: str) -> None:
    print(f"bench overhead: {text}", file=sys.stderr, flush=True)
