"""What each arm adds, how long verdicts take, and what all of it costs, as plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import figures
from benchmarks.overhead.samples import Samples, per, rounds
from benchmarks.overhead.steps import INLINE, PLAIN
from benchmarks.overhead.tables import added

ADDED, VERDICTS, COSTS = "added_latency", "verdict_latency", "cpu_per_request"
_METRICS = (("ttft_ms", "first token"), ("gap_p50_ms", "each further token"), ("total_ms", "whole answer"))


def draw(folder: Path, samples: Samples) -> list[str]:
    """Write every plot there are numbers for; returns their names. Raises CountersignError without matplotlib."""
    found = [figures.save(folder, ADDED, _added(samples))]
    if any(value is not None for row in samples.rows for value in row["verdict_ms"]):
        found.append(figures.save(folder, VERDICTS, _verdicts(samples)))
    return [*found, figures.save(folder, COSTS, _costs(samples))]


def _added(samples: Samples) -> Any:
    figure = figures.new(15, 1.6 + 0.42 * len(samples.cells) * len(samples.arms))
    for place, (metric, name) in enumerate(_METRICS, 1):
        axes = figure.add_subplot(1, 3, place)
        labels: list[str] = []
        for cell in samples.cells:
            for number, arm in enumerate(samples.arms):
                found = added(rounds(samples.beside(cell, arm), metric), rounds(samples.of(cell, arm), metric), 0.5)
                if found is not None:
                    spread = [[found.value - found.low], [found.high - found.value]]
                    axes.barh(len(labels), found.value, xerr=spread, color=f"C{number}", height=0.75, capsize=2)
                    labels.append(f"{cell}: {arm.label}")
        axes.set_yticks(range(len(labels)), labels if place == 1 else [""] * len(labels), fontsize=7)
        axes.invert_yaxis()
        axes.axvline(0, color="grey", linewidth=0.6)
        axes.set_xlabel("milliseconds added to direct, median and 95 %")
        axes.set_title(name, fontsize=10)
    return figure


def _verdicts(samples: Samples) -> Any:
    figure = figures.new(8, 4.5)
    axes = figure.add_subplot(1, 1, 1)
    for cell in samples.cells:
        for arm in samples.arms:
            if arm.name in (PLAIN, INLINE):
                continue
            found = np.sort([each for row in samples.of(cell, arm) for each in row["verdict_ms"] if each is not None])
            if len(found):
                shares = np.arange(1, len(found) + 1) / len(found)
                axes.step(np.maximum(found, 0.1), shares, where="post", label=f"{cell}, audit {arm.audit:.0%}")
    axes.set(xscale="log", xlabel="milliseconds from the answer's last byte to its verdict", ylabel="share of answers")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    return figure


def _costs(samples: Samples) -> Any:
    figure = figures.new(9, 1.6 + 0.35 * len(samples.cells) * len(samples.arms))
    axes = figure.add_subplot(1, 1, 1)
    roles = {
        "proxy": "proxy",
        "verify": "CPU workers",
        "replay": "replay process",
        "store": "Valkey",
        "engine": "engine",
    }
    labels: list[str] = []
    for cell in samples.cells:
        for arm in samples.arms:
            mine, left = samples.of(cell, arm), 0.0
            if not mine:
                continue
            for number, role in enumerate(roles):
                key = PLAIN if (role, arm.name) == ("proxy", PLAIN) else role
                found = per(mine, lambda row, key=key: row["cpu_ms"].get(key), lambda row: row["requests"])  # type: ignore[misc]
                width = 0.0 if found is None else found.value
                axes.barh(len(labels), width, left=left, color=f"C{number}", label=None if labels else roles[role])
                left += width
            labels.append(f"{cell}: {arm.label}")
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("CPU milliseconds per request (seconds per 1,000 requests)")
    axes.legend(fontsize=7)
    return figure
