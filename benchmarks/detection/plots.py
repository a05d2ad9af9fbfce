"""Power against tokens, ROC curves at 128 tokens and e-value paths, as plots."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.detection.curves import LENGTH, LEVEL, Paths, Roc
from benchmarks.harness import figures

POWER, ROC, EVIDENCE = "power", "roc_128", "evidence_paths"


def draw(
    folder: Path, cheats: Mapping[str, Paths], honest: Paths | None, curves: Mapping[str, Mapping[str, Roc]]
) -> list[str]:
    """Write what there are numbers for; returns the names. Raises CountersignError without matplotlib."""
    drawn = [figures.save(folder, POWER, power(cheats)), figures.save(folder, EVIDENCE, evidence(cheats, honest))]
    if curves:
        drawn.insert(1, figures.save(folder, ROC, roc(curves)))
    return drawn


def power(cheats: Mapping[str, Paths]) -> Any:
    """Share of backends accused at one in a million within so many tokens."""
    figure = figures.new(9, 5)
    axes = figure.add_subplot(1, 1, 1)
    for place, (name, paths) in enumerate(cheats.items()):
        tokens = np.geomspace(16, max(32.0, float(paths.tokens.max())), 400)
        axes.step(tokens, paths.power(tokens), where="post", label=name, **_style(place))
    axes.set(xscale="log", xlabel="output tokens audited", ylabel="share accused at one in a million", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def evidence(cheats: Mapping[str, Paths], honest: Paths | None) -> Any:
    """E-values over tokens: medians and the middle 90 % of random orders."""
    figure = figures.new(9, 5)
    axes = figure.add_subplot(1, 1, 1)
    shown = {**({"honest": honest} if honest is not None else {}), **cheats}
    for place, (name, paths) in enumerate(shown.items()):
        style = {"color": "black", "linestyle": "-"} if name == "honest" else _style(place - (honest is not None))
        tokens = paths.tokens.mean(axis=0)
        low, middle, high = np.quantile(paths.evidence, [0.05, 0.5, 0.95], axis=0)
        axes.plot(tokens, middle, linewidth=1.2, label=name, **style)
        axes.fill_between(tokens, low, high, color=style["color"], alpha=0.12, linewidth=0)
    axes.axhline(-math.log10(LEVEL), color="grey", linewidth=0.8, linestyle="--")
    axes.text(
        0.99, -math.log10(LEVEL), "accused ", transform=axes.get_yaxis_transform(), ha="right", va="bottom", fontsize=7
    )
    axes.set(xscale="log", xlabel="output tokens audited", ylabel="log₁₀ of the e-value", ylim=(-4, 14))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def roc(curves: Mapping[str, Mapping[str, Roc]]) -> Any:
    """One panel per statistic."""
    figure = figures.new(5.2 * len(curves), 5)
    for place, (statistic, arms) in enumerate(curves.items(), 1):
        axes = figure.add_subplot(1, len(curves), place)
        for number, (name, curve) in enumerate(arms.items()):
            axes.plot(
                np.maximum(curve.alarms, 1e-4), curve.caught, drawstyle="steps-post", label=name, **_style(number)
            )
        axes.plot(np.geomspace(1e-4, 1, 50), np.geomspace(1e-4, 1, 50), color="grey", linewidth=0.6)
        axes.set(xscale="log", xlim=(8e-4, 1), ylim=(0, 1.02), xlabel="honest answers beyond the threshold")
        axes.set_ylabel("answers caught" if place == 1 else "")
        axes.set_title(f"{statistic}, one answer of {LENGTH} tokens", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    return figure


def _style(place: int) -> dict[str, Any]:
    return {"color": f"C{place % 10}", "linestyle": ("-", "--", ":")[place // 10 % 3]}
