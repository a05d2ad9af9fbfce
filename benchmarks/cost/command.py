"""`countersign bench cost`: what a replay costs beside the answer it checks.

Grows out of LMCV's latency report and takes its options with the same meaning. Every run is a row in
`latency_raw.jsonl`, `load_raw.jsonl` or `pool_raw.jsonl` of the output folder; what has a row already is not run again,
and the tables and plots are made from the rows.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import values
from benchmarks.cost import plan
from benchmarks.cost.estimate import described
from benchmarks.cost.plan import ARMS, LOAD_ARMS, PLAIN, STANDARD_LOADS, VERIFIERS, WORKER, Load
from benchmarks.cost.rows import GRID, LOAD, POOL
from benchmarks.harness import config, machine
from policies.errors import CountersignError


def main(argv: Sequence[str]) -> int:
    """Measure what is missing and write the report; 1 when any row holds an error. Raises CountersignError."""
    options = config.parse(parser(), "cost", argv)
    if options.dry_run:
        print(described(options, chosen_arms(options, options.arms), chosen_arms(options, options.load_arms)).text())
        return 0
    signal.signal(signal.SIGTERM, _terminated)
    if options.report is not None:
        options.output_dir, options.report_only = options.report, True
    if options.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.gpu
    complete = True
    if options.report_only:
        if not any((options.output_dir / name).is_file() for name in (GRID, LOAD, POOL)):
            raise CountersignError(f"bench cost: {options.output_dir} holds no rows of this benchmark")
    else:
        complete = _measured(options)
    from benchmarks.cost.report import write

    try:
        text, failed = write(options.output_dir, plots=not options.no_plots)
    except OSError as error:
        raise CountersignError(f"bench cost: {error.filename}: {error.strerror}") from error
    print(f"\n{text}")
    if not complete:
        print("not everything is measured; the same command goes on", file=sys.stderr)
    print(f"written to {options.output_dir}", file=sys.stderr)
    return 1 if failed else 0


def _measured(options: argparse.Namespace) -> bool:
    """Whether every run that was asked for is measured now."""
    from benchmarks.cost.run import measure

    if not options.model:
        raise CountersignError("bench cost: --model is needed: a folder, or shape:qwen3-8b")
    arms = chosen_arms(options, options.arms)
    options.load_arms = chosen_arms(options, options.load_arms)
    try:
        options.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CountersignError(f"bench cost: {error.filename}: {error.strerror}") from error
    began, clock, load = datetime.now(UTC), time.monotonic(), machine.load()
    complete = measure(options, arms, began.strftime("%Y-%m-%d %H:%M UTC"), load)
    print(f"bench cost: {time.monotonic() - clock:.0f} s", file=sys.stderr)
    return complete


def _terminated(signum: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + signum)


def chosen_arms(options: argparse.Namespace, arms: Sequence[str]) -> list[str]:
    """What LMCV's `--skip-worker` (nothing is generated) and `--skip-verifier` leave of arms, of grid or loads."""
    skipped: set[str] = set()
    if options.skip_worker:
        skipped |= {PLAIN, WORKER}
    if options.skip_verifier:
        skipped |= {*VERIFIERS}
    return [arm for arm in dict.fromkeys(arms) if arm not in skipped]


def parser() -> argparse.ArgumentParser:
    """LMCV's options first, then ours."""
    found = argparse.ArgumentParser(
        prog="countersign bench cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    config.add_arguments(found, "cost")
    found.add_argument("--model", help="model folder; shape:qwen3-8b makes a folder of that shape without weights")
    found.add_argument("--dtype", default="auto")
    found.add_argument("--quantization", default=None)
    found.add_argument("--trust-remote-code", action="store_true")
    found.add_argument("--max-model-len", type=values.count, help="default: the longest cell and one more")
    found.add_argument("--gpu-memory-utilization", type=values.share, help="default: vLLM's")
    found.add_argument("--tensor-parallel-size", type=values.count, default=1)
    found.add_argument("--max-logprobs", type=values.count, help="default: what the reference needs")
    found.add_argument("--gpu", default="", help="CUDA_VISIBLE_DEVICES")
    found.add_argument("--input-lengths", type=_lengths, default=[128, 512, 1024, 2048, 4096], metavar='"128 512"')
    found.add_argument("--output-lengths", type=_lengths, default=[1, 16, 64, 256, 1024], metavar='"1 16"')
    found.add_argument("--top-k", type=values.count, default=20, help="alternatives per token, default 20")
    found.add_argument("--warmup", type=values.natural, default=2, help="untimed runs per cell and arm, default 2")
    found.add_argument(
        "--repeats", type=values.count, default=5, help="timed runs, default 5; one from 2,048 outputs on"
    )
    found.add_argument("--seed", type=values.natural, default=0, help="of prompts, order and arrivals")
    found.add_argument("--max-total-tokens", type=values.natural, default=0, help="leave out longer cells; 0: none")
    found.add_argument("--skip-worker", action="store_true", help="replay made-up answers")
    found.add_argument("--skip-verifier", action="store_true")
    found.add_argument("--output-dir", type=Path, default=Path("benchmarks/results/cost"))
    ours = found.add_argument_group("beyond LMCV's")
    ours.add_argument("--load-format", default="auto", help="vLLM's; `dummy` makes weights up")
    ours.add_argument(
        "--engine", type=values.arguments, default={}, help="more keyword arguments of the engine, as JSON"
    )
    ours.add_argument("--runtime", default="", help="declared runtime of the worker, as in countersign.yaml")
    ours.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS), help="of the grid; none: no grid")
    ours.add_argument("--worker-repeats", type=values.count, help="timed runs of the worker, default --repeats")
    ours.add_argument(
        "--load",
        type=_loads,
        nargs="?",
        const=plan.loads(STANDARD_LOADS),
        default=[],
        metavar="COUNTxINPUT/OUTPUT",
        help=f"many requests at once; alone: {STANDARD_LOADS!r}",
    )
    ours.add_argument("--load-arms", nargs="*", choices=LOAD_ARMS, default=list(LOAD_ARMS))
    ours.add_argument("--load-repeats", type=values.count, default=3)
    ours.add_argument("--pool", action="store_true", help="also through Redis, workers and judge; needs --load's rows")
    ours.add_argument("--pool-seconds", type=values.duration, default=20.0, help="length of a phase, default 20")
    ours.add_argument("--pool-workers", type=values.count, default=max(1, min(6, (os.cpu_count() or 2) // 2)))
    ours.add_argument(
        "--pool-repeats", type=values.count, default=3, help="generations per cell one at a time, default 3"
    )
    ours.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="go on from the rows")
    ours.add_argument(
        "--time-limit", type=values.seconds, default=0.0, help="seconds after which no run begins; 0: none"
    )
    ours.add_argument("--report-only", action="store_true", help="measure nothing, only write the report")
    ours.add_argument("--report", type=Path, metavar="DIR", help="the same for this folder")
    ours.add_argument("--no-plots", action="store_true", help="tables only; needs no matplotlib")
    return found


def _lengths(text: str) -> list[int]:
    try:
        return plan.lengths(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {error}") from error


def _loads(text: str) -> list[Load]:
    """At least one, each once."""
    try:
        found = list({load.name: load for load in plan.loads(text)}.values())
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {error}") from error
    if not found:
        raise argparse.ArgumentTypeError("expected loads, such as 64x128/1024")
    return found
