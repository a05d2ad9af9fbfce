"""`countersign bench fidelity`: the 65 cases against this proxy and others."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import values
from benchmarks.fidelity import gateways, report
from benchmarks.fidelity.run import run
from policies.errors import CountersignError


def main(argv: Sequence[str]) -> int:
    """Run it; 1 when a case does not hold of our own proxy. Raises CountersignError."""
    arguments = parser().parse_args(list(argv))
    rows = report.read(arguments.output.with_suffix(".jsonl"))
    if not arguments.page:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        for plan in _plans(arguments):
            print(f"bench fidelity: {plan.name}", file=sys.stderr, flush=True)
            rows = report.merged(rows, run(plan, arguments.port, arguments.select))
            report.write(rows, arguments.output)
    if not rows:
        raise CountersignError(f"bench fidelity: {arguments.output}.jsonl has no runs")
    print(report.write(rows, arguments.output))
    mine = [row for row in rows if row["kind"] == "test" and row["gateway"] == gateways.ours().name]
    return 1 if any(row["outcome"] != report.HOLDS for row in mine) else 0


def parser() -> argparse.ArgumentParser:
    """Its command line."""
    made = argparse.ArgumentParser("countersign bench fidelity", description=__doc__)
    made.add_argument("--litellm", metavar="FILE", help="LiteLLM's command, in an environment of its own")
    made.add_argument("--vllm-router", metavar="FILE", help="vLLM's router, in an environment of its own")
    made.add_argument("--not-ours", action="store_true", help="leave this proxy out; what it had stays in the page")
    made.add_argument("--select", metavar="WORDS", help="only tests whose names match (pytest's -k)")
    made.add_argument("--port", type=values.count, default=9300, help="first of the ports that are taken")
    made.add_argument("--page", action="store_true", help="only make the page again from its lines")
    made.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/fidelity"), help="path without .md and .jsonl"
    )
    return made


def _plans(arguments: argparse.Namespace) -> list[gateways.Plan]:
    plans = [] if arguments.not_ours else [gateways.ours()]
    if arguments.litellm:
        plans.append(gateways.litellm(str(Path(arguments.litellm).absolute())))
    if arguments.vllm_router:
        plans.append(gateways.vllm_router(str(Path(arguments.vllm_router).absolute())))
    return plans
