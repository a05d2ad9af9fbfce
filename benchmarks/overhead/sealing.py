"""What it costs to encrypt evidence: processor time per value, by its size.

python -m benchmarks.overhead.sealing
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable

from verifier_pool.link.sealing import OVERHEAD, Sealer

SIZES = (1024, 8 * 1024, 64 * 1024, 1024 * 1024)
"""Bytes: packed evidence of a token takes some 90 to 120 (docs/capacity.md)."""
ROUNDS = 41
ABOUT = b"{countersign}:evidence:" + b"0" * 32


def microseconds(work: Callable[[], object], times: int) -> float:
    """Median over rounds of the thread's processor time for one call, in µs."""
    found = []
    for _ in range(ROUNDS):
        began = time.thread_time_ns()
        for _ in range(times):
            work()
        found.append((time.thread_time_ns() - began) / times / 1000)
    return statistics.median(found)


def main() -> None:
    """Print a table."""
    sealer = Sealer([secrets.token_bytes(32)])
    print(f"| bytes | seal, µs | open, µs | (each value is {OVERHEAD} bytes longer)")
    print("|---|---|---|")
    for size in SIZES:
        plain = secrets.token_bytes(size)
        sealed = sealer.seal(plain, ABOUT)
        times = max(1, 200_000 // size)
        seal = microseconds(lambda plain=plain: sealer.seal(plain, ABOUT), times)  # type: ignore[misc]
        opened = microseconds(lambda sealed=sealed: sealer.open(sealed, ABOUT), times)  # type: ignore[misc]
        print(f"| {size:,} | {seal:.1f} | {opened:.1f} |")


if __name__ == "__main__":
    main()
