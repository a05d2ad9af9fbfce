"""What a gateway adds to first tokens and what a chunk costs it, by streams, as plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import figures
from benchmarks.overhead.relay import report
from benchmarks.overhead.relay.loads import LOADS
from benchmarks.overhead.relay.measure import Burst

FIRST, CHUNK = "first_token", "cpu_per_chunk"


def draw(folder: Path, bursts: Sequence[Burst]) -> list[str]:
    """Write both; returns their names. Raises CountersignError without matplotlib."""
    return [figures.save(folder, FIRST, _first(bursts)), figures.save(folder, CHUNK, _chunk(bursts))]


def _arms(bursts: Sequence[Burst]) -> list[str]:
    return [arm for arm in report.LABELS if arm != "direct" and any(burst.arm == arm for burst in bursts)]


def _first(bursts: Sequence[Burst]) -> Any:
    figure = figures.new(7, 4.5)
    axes = figure.add_subplot(1, 1, 1)
    for arm in _arms(bursts):
        points = [
            (streams, found)
            for streams, load in sorted(LOADS.items())
            if (found := report.added_first(bursts, arm, load)) is not None
        ]
        if points:
            _line(axes, report.LABELS[arm], points)
    axes.set(xscale="log", yscale="log", xlabel="streams at once", ylabel="first token adds, median ms")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def _chunk(bursts: Sequence[Burst]) -> Any:
    figure = figures.new(7, 4.5)
    axes = figure.add_subplot(1, 1, 1)
    for arm in _arms(bursts):
        points = [
            (streams, found)
            for streams, load in sorted(LOADS.items())
            if (found := report.whole_cost(report.bursts_of(bursts, arm, load))) is not None
        ]
        if points:
            _line(axes, report.LABELS[arm], points)
    axes.set(xscale="log", yscale="log", xlabel="streams at once", ylabel="CPU per chunk, its request's shared out, µs")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def _line(axes: Any, label: str, points: Sequence[tuple[int, Any]]) -> None:
    x, found = zip(*points, strict=True)
    spread = [[max(each.value - each.low, 0.0) for each in found], [max(each.high - each.value, 0.0) for each in found]]
    axes.errorbar(x, [each.value for each in found], yerr=spread, marker="o", markersize=4, capsize=3, label=label)
