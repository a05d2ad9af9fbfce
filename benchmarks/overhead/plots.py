"""What each arm adds, how long verdicts take, and what all of it costs, as plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import figures
from benchmarks.overhead.samples import TOKEN, Arm, Samples, per, rounds
from benchmarks.overhead.steps import INLINE, PLAIN
from benchmarks.overhead.tables import added

ADDED, VERDICTS, COSTS = "added_latency", "verdict_latency", "cpu_per_request"
_METRICS = (("ttft_ms", "first token"), (TOKEN, "each further token"), ("total_ms", "whole answer"))
_OURS = {"proxy": "proxy", "verify": "CPU workers", "replay": "replay process", "store": "Valkey"}
_DASHES = ("-", "--", ":", "-.")
_SPREAD = 30.0
"""How many times a quarter of the bars the longest one is where a linear axis would hide that quarter."""


def draw(folder: Path, samples: Samples) -> list[str]:
    """Write every plot there are numbers for; returns their names. Raises CountersignError without matplotlib."""
    found = [figures.save(folder, ADDED, _added(samples))]
    if any(value is not None for row in samples.rows for value in row["verdict_ms"]):
        found.append(figures.save(folder, VERDICTS, _verdicts(samples)))
    return [*found, figures.save(folder, COSTS, _costs(samples))]


def _places(samples: Samples) -> dict[tuple[str, Arm], float]:
    """Where the bar of each load and arm lies: a gap between loads."""
    found: dict[tuple[str, Arm], float] = {}
    for number, cell in enumerate(samples.cells):
        for arm in samples.arms:
            found[cell, arm] = len(found) + 0.7 * number
    return found


def _name(axes: Any, places: dict[tuple[str, Arm], float], shown: bool) -> None:
    """Name every bar; only the first of several plots side by side has room for that."""
    names = [f"{cell}: {arm.label}" if shown else "" for cell, arm in places]
    axes.set_yticks(list(places.values()), names, fontsize=7)
    axes.set_ylim(max(places.values()) + 0.8, -0.8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _added(samples: Samples) -> Any:
    places = _places(samples)
    figure = figures.new(15, 1.6 + 0.24 * max(places.values()))
    for place, (metric, name) in enumerate(_METRICS, 1):
        axes = figure.add_subplot(1, 3, place)
        values: list[float] = []
        for (cell, arm), at in places.items():
            found = added(rounds(samples.beside(cell, arm), metric), rounds(samples.of(cell, arm), metric), 0.5)
            if found is not None:
                spread = [[found.value - found.low], [found.high - found.value]]
                color = f"C{samples.arms.index(arm)}"
                axes.barh(at, found.value, xerr=spread, color=color, height=0.75, capsize=2)
                values.append(found.value)
        _name(axes, places, shown=place == 1)
        axes.axvline(0, color="grey", linewidth=0.6)
        axes.set_xlabel(f"milliseconds added to direct, median and 95 %{_widen(axes, values)}")
        axes.set_title(name, fontsize=10)
    return figure


def _widen(axes: Any, values: Sequence[float]) -> str:
    """Make the axis logarithmic where the longest bar would hide the others; returns what to say of that."""
    sizes = np.abs(values)
    if not len(sizes) or sizes.max() <= max(_SPREAD * np.quantile(sizes, 0.25), 10.0):
        return ""
    axes.set_xscale("symlog", linthresh=1.0, linscale=0.5)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.tick_params(axis="x", labelsize=8)
    return ";\nlogarithmic beyond 1 and −1"


def _verdicts(samples: Samples) -> Any:
    figure = figures.new(10, 4.8)
    axes = figure.add_subplot(1, 1, 1)
    after = [arm for arm in samples.arms if arm.name not in (PLAIN, INLINE)]
    for color, cell in enumerate(samples.cells):
        for number, arm in enumerate(after):
            found = np.sort([each for row in samples.of(cell, arm) for each in row["verdict_ms"] if each is not None])
            if len(found):
                shares = np.arange(1, len(found) + 1) / len(found)
                label = f"{cell}, audit {arm.audit:.0%} ({len(found)})"
                line = {"color": f"C{color}", "linestyle": _DASHES[number % len(_DASHES)]}
                axes.step(np.maximum(found, 0.1), shares, where="post", label=label, **line)
    axes.set(xscale="log", xlabel="milliseconds from the answer's last byte to its verdict", ylabel="share of answers")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    # Curves leave no corner free.
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5), title="load (answers)", title_fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def _costs(samples: Samples) -> Any:
    """Our processes; and the reference's engine on an axis of its own, beside which they would be invisible."""
    places = _places(samples)
    engine = any(row["cpu_ms"].get("engine") for row in samples.rows)
    figure = figures.new(14 if engine else 9, 1.8 + 0.24 * max(places.values()))
    axes = figure.add_subplot(1, 2 if engine else 1, 1)
    for (cell, arm), at in places.items():
        left = 0.0
        for number, role in enumerate(_OURS):
            width = _cpu(samples, cell, arm, role)
            axes.barh(at, width, left=left, color=f"C{number}", label=_OURS[role] if at == 0 else None)
            left += width
    _name(axes, places, shown=True)
    axes.set_xlabel("CPU milliseconds per request (seconds per 1,000 requests)")
    axes.legend(fontsize=7, ncols=len(_OURS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    if engine:
        beside = figure.add_subplot(1, 2, 2)
        widths = [_cpu(samples, cell, arm, "engine") for cell, arm in places]
        beside.barh(list(places.values()), widths, color=f"C{len(_OURS)}")
        _name(beside, places, shown=False)
        beside.set_xlabel("the same of the reference's engine, on another scale")
    return figure


def _cpu(samples: Samples, cell: str, arm: Arm, role: str) -> float:
    """Milliseconds of a process per request."""
    key = PLAIN if (role, arm.name) == ("proxy", PLAIN) else role
    found = per(samples.of(cell, arm), lambda row: row["cpu_ms"].get(key), lambda row: row["requests"])
    return 0.0 if found is None else found.value
