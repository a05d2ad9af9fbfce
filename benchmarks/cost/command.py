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
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.cost.plan import ARMS, LOAD_ARMS, STANDARD_LOADS, VERIFIERS, WORKER, lengths, loads
from policies.errors import CountersignError


def main(argv: Sequence[str]) -> int:
    """Measure what is missing and write the report; 1 when any row holds an error. Raises CountersignError."""
    options = parser().parse_args(list(argv))
    signal.signal(signal.SIGTERM, _terminated)
    if options.report is not None:
        options.output_dir, options.report_only = options.report, True
    if options.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.gpu
    complete = True
    if not options.report_only:
        from benchmarks.cost.run import measure

        if not options.model:
            raise CountersignError("bench cost: --model is needed: a folder, or shape:qwen3-8b")
        began, clock = datetime.now(UTC), time.monotonic()
        complete = measure(options, chosen_arms(options), began.strftime("%Y-%m-%d %H:%M UTC"))
        print(f"bench cost: {time.monotonic() - clock:.0f} s", file=sys.stderr)
    from benchmarks.cost.report import write

    text, failed = write(options.output_dir, plots=not options.no_plots)
    print(f"\n{text}")
    if not complete:
        print("not everything is measured; the same command goes on", file=sys.stderr)
    print(f"written to {options.output_dir}", file=sys.stderr)
    return 1 if failed else 0


def _terminated(signum: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + signum)


def chosen_arms(options: argparse.Namespace) -> list[str]:
    """Arms of the grid, after LMCV's `--skip-worker` and `--skip-verifier`."""
    arms = list(dict.fromkeys(options.arms))
    if options.skip_worker:
        arms = [arm for arm in arms if arm != WORKER]
    if options.skip_verifier:
        arms = [arm for arm in arms if arm not in VERIFIERS]
    return arms


def parser() -> argparse.ArgumentParser:
    """LMCV's options first, then ours."""
    found = argparse.ArgumentParser(
        prog="countersign bench cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--model", help="model folder; shape:qwen3-8b makes a folder of that shape without weights")
    found.add_argument("--dtype", default="auto")
    found.add_argument("--quantization", default=None)
    found.add_argument("--trust-remote-code", action="store_true")
    found.add_argument("--max-model-len", type=_count, help="default: the longest cell and one more")
    found.add_argument("--gpu-memory-utilization", type=float, help="default: vLLM's")
    found.add_argument("--tensor-parallel-size", type=_count, default=1)
    found.add_argument("--max-logprobs", type=_count, help="default: what the reference needs")
    found.add_argument("--gpu", default="", help="CUDA_VISIBLE_DEVICES")
    found.add_argument("--input-lengths", type=_lengths, default=[128, 512, 1024, 2048, 4096], metavar='"128 512"')
    found.add_argument("--output-lengths", type=_lengths, default=[1, 16, 64, 256, 1024], metavar='"1 16"')
    found.add_argument("--top-k", type=_count, default=20, help="alternatives per token, default 20")
    found.add_argument("--warmup", type=int, default=2, help="untimed runs per cell and arm, default 2")
    found.add_argument("--repeats", type=_count, default=5, help="timed runs, default 5; one from 2,048 outputs on")
    found.add_argument("--seed", type=int, default=0, help="of prompts, order and arrivals")
    found.add_argument("--max-total-tokens", type=int, default=0, help="leave out longer cells; 0: none")
    found.add_argument("--skip-worker", action="store_true", help="replay made-up answers")
    found.add_argument("--skip-verifier", action="store_true")
    found.add_argument("--output-dir", type=Path, default=Path("benchmarks/results/cost"))
    ours = found.add_argument_group("beyond LMCV's")
    ours.add_argument("--load-format", default="auto", help="vLLM's; `dummy` makes weights up")
    ours.add_argument("--engine", type=_object, default={}, help="more keyword arguments of the engine, as JSON")
    ours.add_argument("--runtime", default="", help="declared runtime of the worker, as in countersign.yaml")
    ours.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS), help="of the grid; none: no grid")
    ours.add_argument("--worker-repeats", type=_count, help="timed runs of the worker, default --repeats")
    ours.add_argument(
        "--load",
        type=_loads,
        nargs="?",
        const=loads(STANDARD_LOADS),
        default=[],
        metavar="COUNTxINPUT/OUTPUT",
        help=f"many requests at once; alone: {STANDARD_LOADS!r}",
    )
    ours.add_argument("--load-arms", nargs="*", choices=LOAD_ARMS, default=list(LOAD_ARMS))
    ours.add_argument("--load-repeats", type=_count, default=3)
    ours.add_argument("--pool", action="store_true", help="also through Redis, workers and judge; needs --load's rows")
    ours.add_argument("--pool-seconds", type=float, default=20.0, help="length of a phase, default 20")
    ours.add_argument("--pool-workers", type=_count, default=max(1, min(6, (os.cpu_count() or 2) // 2)))
    ours.add_argument("--pool-repeats", type=_count, default=3, help="generations per cell one at a time, default 3")
    ours.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="go on from the rows")
    ours.add_argument("--time-limit", type=float, default=0.0, help="seconds after which no run begins; 0: none")
    ours.add_argument("--report-only", action="store_true", help="measure nothing, only write the report")
    ours.add_argument("--report", type=Path, metavar="DIR", help="the same for this folder")
    ours.add_argument("--no-plots", action="store_true", help="tables only; needs no matplotlib")
    return found


def _checked(read: Callable[[str], Any], text: str) -> Any:
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {error}") from error


def _lengths(text: str) -> Any:
    return _checked(lengths, text)


def _loads(text: str) -> Any:
    return _checked(loads, text)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, not {value}")
    return value


def _object(text: str) -> Any:
    import json

    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object ({error})") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("expected a JSON object")
    return found
