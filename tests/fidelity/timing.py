"""Bounds on time, asserted with `--timed` only: on a machine that does nothing else, as `countersign bench fidelity`
is run. Elsewhere the same things have to happen, in the same order, however long they take."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.lateness import Lateness

__all__ = ["Lateness", "assert_mostly", "timing"]
TRIES = 5


@dataclass
class Timing:
    """Whether bounds on time are asserted."""

    asserted: bool = False


timing = Timing()


def assert_mostly(measured: Callable[[], float], bound: float, tries: int = TRIES) -> None:
    """Asserts that the median of several measurements is below a bound. One that a machine's standing still came into
    is forgiven; what is too late more often than not is found. Ends as soon as it is decided. Without `--timed` it is
    measured once, whatever comes out.

    Args:
        measured: seconds, less the lateness of the machine.
        tries: an odd number.
    """
    if not timing.asserted:
        measured()
        return
    took: list[float] = []
    while max(sum(each < bound for each in took), sum(each >= bound for each in took)) <= tries // 2:
        took.append(measured())
    assert statistics.median(took) < bound, took
