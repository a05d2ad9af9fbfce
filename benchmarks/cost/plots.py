"""Heat-maps of worker ÷ verifier and curves, as PNG and SVG. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cost import summary
from benchmarks.cost.plan import ARMS, DICTS, FLAT, IDS, WORKER
from benchmarks.cost.pool import QUEUEING
from benchmarks.cost.summary import Grid, lengths_of, ratio
from benchmarks.harness import figures
from benchmarks.harness.rows import Row

HEAT, CURVES, DELAYS = "ratio_heatmap", "cost_curves", "queue_delay"


def draw(folder: Path, cells: Grid, pool: Sequence[Row]) -> list[str]:
    """Write every plot there are numbers for; returns their names without ending.

    Raises:
        CountersignError: matplotlib is missing.
    """
    drawn = {HEAT: _heat(cells), CURVES: _curves(cells)}
    if queueing := [row for row in pool if row["phase"] == QUEUEING and row["latency_s"]]:
        drawn[DELAYS] = _delays(queueing)
    return [figures.save(folder, name, figure) for name, figure in drawn.items()]


def _heat(cells: Grid) -> Any:
    grids = {f"ours, {arm}": {cell: ratio(cells, cell, arm) for cell in cells} for arm in (IDS, FLAT, DICTS)}
    for name, lines in summary.published().items():
        grids[f"LMCV (dicts): {name}"] = {
            (int(line["input_len"]), int(line["output_len"])): line["worker_over_verifier_median"] for line in lines
        }
    figure = figures.new(17, 8.5)
    for place, (name, values) in enumerate(grids.items(), 1):
        inputs, outputs = lengths_of(values)
        axes = figure.add_subplot(2, 3, place)
        shown = np.array([[values.get((one, other)) or np.nan for other in outputs] for one in inputs], float)
        axes.imshow(np.log10(shown), cmap="viridis", vmin=-0.5, vmax=2.4, aspect="auto")
        axes.set_xticks(range(len(outputs)), outputs)
        axes.set_yticks(range(len(inputs)), inputs)
        axes.set_xlabel("output tokens")
        axes.set_ylabel("input tokens")
        axes.set_title(f"worker ÷ verifier, {name}", fontsize=10)
        for row, column in np.argwhere(~np.isnan(shown)):
            value = shown[row, column]
            dark = np.log10(value) < 1.3
            text = f"{value:.0f}" if value >= 10 else f"{value:.2g}"
            axes.text(column, row, text, ha="center", va="center", color="white" if dark else "black", fontsize=8)
    return figure


def _curves(cells: Grid) -> Any:
    figure = figures.new(14, 5.5)
    times, ratios = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    for arm in ARMS:
        points = sorted(
            (cell[1] if arm == WORKER else sum(cell), each[arm].median)
            for cell, each in cells.items()
            if arm in each and each[arm].median is not None
        )
        if points:
            label = "worker (by output tokens)" if arm == WORKER else f"{arm} (by all tokens)"
            line = "" if arm == WORKER else "-"
            times.plot(*zip(*points, strict=True), line, marker="o", markersize=3, linewidth=0.8, label=label)
    times.set(xscale="log", yscale="log", xlabel="tokens", ylabel="seconds", title="one at a time")
    times.legend(fontsize=8)
    inputs, outputs = lengths_of(cells)
    shown = [inputs[0], inputs[len(inputs) // 2], inputs[-1]]
    published = summary.published()
    for number, one in enumerate(dict.fromkeys(shown)):
        color = f"C{number}"
        own = [(other, value) for other in outputs if (value := ratio(cells, (one, other), IDS)) is not None]
        if own:
            ratios.plot(*zip(*own, strict=True), marker="o", color=color, label=f"ours, ids, {one} in")
        for lines, style in zip(published.values(), ("--", ":"), strict=True):
            theirs = [(x["output_len"], x["worker_over_verifier_median"]) for x in lines if x["input_len"] == one]
            if theirs:
                ratios.plot(*zip(*theirs, strict=True), style, color=color, linewidth=0.9)
    ratios.axhline(1, color="grey", linewidth=0.6)
    ratios.set(xscale="log", yscale="log", xlabel="output tokens", ylabel="worker ÷ verifier")
    ratios.set_title("dashed: LMCV 8B on RTX 4090, dotted: 32B on H100 NVL", fontsize=10)
    ratios.legend(fontsize=8)
    return figure


def _delays(rows: Sequence[Row]) -> Any:
    figure = figures.new(7, 4.5)
    axes = figure.add_subplot(1, 1, 1)
    for load in dict.fromkeys(row["load"] for row in rows):
        own = sorted((row for row in rows if row["load"] == load), key=lambda row: row["level"])
        levels = [100 * row["level"] for row in own]
        for quantile, style in (("p50", "-"), ("p95", "--"), ("p99", ":")):
            delays = [row["latency_s"][quantile] for row in own]
            axes.plot(levels, delays, style, marker="o", markersize=3, label=f"{load}, {quantile}")
    axes.set(xlabel="load, % of measured capacity", ylabel="seconds to the verdict", yscale="log")
    axes.legend(fontsize=8)
    return figure
