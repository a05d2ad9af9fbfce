"""`countersign bench NAME …`: picks a benchmark. Each is imported only when asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

BENCHES: dict[str, tuple[str, str]] = {
    "policies": ("benchmarks.policies.command", "what the CPU checks cost per 1,000 tokens"),
    "detection": ("benchmarks.detection.command", "what the checks say of recorded honest and cheating engines"),
    "standing": (
        "benchmarks.standing.command",
        "whom standing accuses: honest backends and such as turn bad, simulated",
    ),
    "chaos": ("benchmarks.chaos.command", "whether anything is lost when everything is killed at random"),
    "cost": ("benchmarks.cost.command", "what a replay costs beside the answer it checks, alone and in the pool"),
    "fidelity": ("benchmarks.fidelity.command", "the 65 fidelity cases against this proxy and other gateways"),
    "leaks": ("benchmarks.leaks.command", "what is left when clients and failures of every kind have come and gone"),
    "overhead": ("benchmarks.overhead.command", "what a request costs directly, relayed, and verified"),
    "relay": ("benchmarks.overhead.relay.command", "what the relay alone adds, up to 1,000 streams, beside LiteLLM"),
    "report": ("benchmarks.harness.report", "every table and figure again, from the rows that are there"),
}


def main(argv: Sequence[str]) -> int:
    """Run one benchmark; returns its exit code."""
    if not argv or argv[0] in {"-h", "--help"}:
        print(_usage())
        return 0 if argv else 2
    name, *rest = argv
    if name not in BENCHES:
        print(f"countersign bench: no benchmark {name!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    return int(importlib.import_module(BENCHES[name][0]).main(rest))


def _usage() -> str:
    width = max(map(len, BENCHES))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in BENCHES.items())
    return f"usage: countersign bench NAME …\n\n{rows}\n\n`countersign bench NAME --help` says more."
