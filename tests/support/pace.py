"""How fast this machine is, for bounds on what is computed."""

from __future__ import annotations

import time

_LOOPS = 1_000_000
_USUAL = 0.03
"""Seconds of CPU that the loop takes where the bounds were found."""


def pace() -> float:
    """How many times slower this thread computes now than where the bounds were found; 1 at the least."""
    return max(1.0, min(_loop() for _ in range(3)) / _USUAL)


def _loop() -> float:
    began = time.thread_time()
    total = 0
    for at in range(_LOOPS):
        total += at
    return time.thread_time() - began
