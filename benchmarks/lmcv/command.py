"""`countersign lmcv NAME …`: picks a step of the pipeline. Each is imported only when asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

STEPS: dict[str, tuple[str, str]] = {
    "prompts": ("benchmarks.lmcv.prompts", "write prompts of ten kinds in buckets of length"),
    "collect": ("benchmarks.lmcv.collect", "have a server answer them and keep its evidence"),
    "verify": (
        "benchmarks.lmcv.verify",
        "replay the answers on a trusted server or engine and compare, token by token",
    ),
    "summarise": ("benchmarks.lmcv.summarise", "distributions, windows and a named policy's verdicts"),
}


def main(argv: Sequence[str]) -> int:
    """Run one step; returns its exit code."""
    if not argv or argv[0] in {"-h", "--help"}:
        print(_usage())
        return 0 if argv else 2
    name, *rest = argv
    if name not in STEPS:
        print(f"countersign lmcv: no step {name!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    return int(importlib.import_module(STEPS[name][0]).main(rest))


def _usage() -> str:
    width = max(map(len, STEPS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in STEPS.items())
    return f"usage: countersign lmcv STEP …\n\n{rows}\n\n`countersign lmcv STEP --help` says more."
