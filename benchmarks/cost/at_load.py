"""The report's part on many requests in the engine at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.cost.plan import LOAD_ARMS, PLAIN, PREFILL, WORKER
from benchmarks.harness.markdown import figure, table
from benchmarks.harness.rows import Row


def speeds(rows: Iterable[Row]) -> dict[tuple[str, str], list[float]]:
    """Seconds of every good run by load and arm."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if not row["error"]:
            found[row["load"], row["arm"]].append(float(row["seconds"]))
    return dict(found)


def rate(rows: Sequence[Row], load: str, arm: str) -> float | None:
    """Tokens a second (prompt and answer; of generation only the answer's), by the median run; None without one."""
    seconds = speeds(rows).get((load, arm))
    size = next((row for row in rows if row["load"] == load), None)
    if not seconds or size is None:
        return None
    tokens = size["output_tokens"] if arm in (PLAIN, WORKER) else size["tokens"]
    return float(tokens / np.median(seconds))


def load_text(rows: Sequence[Row]) -> str:
    """The section."""
    parts = [
        "## At load\n\nAll requests submitted at once, until the last result; medians. Share of the floor = tokens per "
        "second ÷ those of `prefill`. Share of generation = replaying all of these answers, in GPU time of generating "
        "them with logprobs."
    ]
    every = speeds(rows)
    for load in dict.fromkeys(row["load"] for row in rows):
        size = next(row for row in rows if row["load"] == load)
        floor, worker = rate(rows, load, PREFILL), every.get((load, WORKER))
        lines = []
        for arm in LOAD_ARMS:
            seconds = every.get((load, arm))
            if not seconds:
                continue
            middle = float(np.median(seconds))
            speed = rate(rows, load, arm)
            replays = arm not in (PLAIN, WORKER)
            lines.append(
                [
                    f"`{arm}`",
                    figure(middle),
                    f"{figure(min(seconds))}–{figure(max(seconds))}" if len(seconds) >= 3 else "",
                    figure(speed, 0) + ("" if replays else " out"),
                    f"{speed / floor:.1%}" if replays and floor and speed else "",
                    f"{middle / float(np.median(worker)):.1%}" if replays and worker else "",
                    str(len(seconds)),
                ]
            )
        head = ["arm", "s", "range", "tokens/s", "share of the floor", "share of generation", "n"]
        parts.append(f"### {load} ({size['requests']} requests, {size['tokens']:,} tokens)\n\n" + table(head, lines))
    return "\n\n".join(parts)
