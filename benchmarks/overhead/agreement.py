"""Whether vLLM's own load tool and ours say the same, within the noise of both."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.harness.markdown import table
from benchmarks.harness.rows import Row
from benchmarks.harness.statistics import median
from benchmarks.overhead.samples import LABELS
from benchmarks.overhead.steps import ARMS, DIRECT
from benchmarks.overhead.witness import METRICS, OURS, THEIRS, WITNESS

FEWEST_ROUNDS = 3
NAMES = dict(zip(METRICS, ("first token", "each further token", "whole answer"), strict=True))


def agreement(rows: Sequence[Row]) -> str:
    """The section; empty where the witness was not heard."""
    if not any(row["what"] == WITNESS and not row["error"] for row in rows):
        return ""
    failed = [row for row in rows if row["what"] == WITNESS and row["error"]]
    text = (
        "## An outside witness\n\n`vllm bench serve` on the same stack, its runs shuffled with runs of our client "
        "under the same load. Milliseconds: median over rounds of each run's median request, with its 95 % interval; "
        f"noise = both intervals' half widths together. The two agree where their difference is no more than that; "
        f"fewer than {FEWEST_ROUNDS} rounds cannot tell."
    )
    head = ["arm", "time", "ours", "vllm bench serve", "difference", "noise", "agree"]
    more = f"\n\n{len(failed)} runs failed: {', '.join(sorted({row['error'] for row in failed}))}." if failed else ""
    return f"{text}\n\n{table(head, lines(rows))}{more}"


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """Arm, time, what either tool says, their difference, the noise, and whether they agree: empty where few rounds
    cannot tell.
    """
    heard = [row for row in rows if row["what"] == WITNESS and not row["error"]]
    found = []
    for arm in [arm for arm in ARMS if any(row["arm"] == arm for row in heard)]:
        for metric, name in NAMES.items():
            ours, theirs = _by_round(heard, arm, metric, OURS), _by_round(heard, arm, metric, THEIRS)
            if ours and theirs:
                found.append(_line(LABELS.get(arm, arm), name, [*ours.values()], [*theirs.values()]))
                if arm != DIRECT:
                    found.append(_added(heard, arm, metric, name))
    return found


def _added(rows: Sequence[Row], arm: str, metric: str, name: str) -> list[str]:
    """What an arm adds to `direct`, by either tool."""
    found = []
    for tool in (OURS, THEIRS):
        mine, base = _by_round(rows, arm, metric, tool), _by_round(rows, DIRECT, metric, tool)
        shared = sorted(mine.keys() & base.keys())
        if not shared:
            return [f"{LABELS[arm]}, added", name, "", "", "", "", ""]
        found.append([mine[number] - base[number] for number in shared])
    return _line(f"{LABELS[arm]}, added", name, *found)


def _by_round(rows: Sequence[Row], arm: str, metric: str, tool: str) -> dict[int, float]:
    found = {}
    for row in rows:
        values = [value for value in row[metric] if value is not None]
        if (row["arm"], row["tool"]) == (arm, tool) and values:
            found[row["round"]] = float(np.median(values))
    return found


def _line(arm: str, name: str, by_us: Sequence[float], by_them: Sequence[float]) -> list[str]:
    ours, theirs = median(by_us), median(by_them)
    difference, noise = ours.value - theirs.value, math.hypot(ours.noise, theirs.noise)
    agree = "yes" if abs(difference) <= noise else "NO"
    if min(len(by_us), len(by_them)) < FEWEST_ROUNDS:
        agree = ""
    return [arm, name, ours.text(), theirs.text(), f"{difference:.2f}", f"{noise:.2f}", agree]
