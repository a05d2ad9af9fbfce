"""The report's part on the whole pool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from benchmarks.cost.at_load import rate
from benchmarks.cost.plan import FLAT, IDS, PREFILL
from benchmarks.cost.pool import CAPACITY, LATENCY, QUEUEING
from benchmarks.cost.stack import ROLES
from benchmarks.cost.summary import Grid, Times
from benchmarks.harness.markdown import figure, milliseconds, table
from benchmarks.harness.rows import Row

LABELS = {
    "verify": "CPU workers (checks, judge)",
    "replay": "replay process",
    "engine": "engine's own process",
    "store": "Valkey",
    "feeder": "recorder (in the proxy)",
}


def pool_text(rows: Sequence[Row], load: Sequence[Row], cells: Grid) -> str:
    """The section."""
    parts = [
        "## Through the whole pool\n\nGenerations are fed by the proxy's recorder into a real Valkey; CPU workers, one "
        "replay process with this engine, judge, verdicts. Every generation is audited. Share 0: replays of form "
        "`ids`; share 0.25: a secret quarter of form `full`, the default."
    ]
    rows = [row for row in rows if row.get("seconds", 0.0) is not None]  # of what broke off there is nothing to tell
    capacity = [row for row in rows if row["phase"] == CAPACITY and not row["warm"]]
    if capacity:
        parts.append(_capacity(capacity, load))
        parts.append(_cpu(capacity))
    if queueing := [row for row in rows if row["phase"] == QUEUEING]:
        parts.append(_queueing(queueing))
    if latency := [row for row in rows if row["phase"] == LATENCY and not row["error"]]:
        parts.append(_latency(latency, cells))
    return "\n\n".join(parts)


def capacity(rows: Sequence[Row], load: str, share: float) -> Row:
    """The good row of a load's phase as fast as it goes, at that share of form `full`. Raises ValueError without it."""
    (found,) = (
        row
        for row in rows
        if (row["phase"], row["share"], row.get("load")) == (CAPACITY, share, load)
        and not (row["warm"] or row["error"])
    )
    return found


def share_of_floor(load: Sequence[Row], rows: Sequence[Row], name: str, share: float) -> float | None:
    """Tokens per second of that phase ÷ those of bare prefills of the same load; None without such prefills."""
    floor = rate(load, name, PREFILL)
    return None if floor is None else float(capacity(rows, name, share)["tokens_per_s"] / floor)


def _capacity(rows: Sequence[Row], load: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        floor = rate(load, row["load"], PREFILL)
        speed, steady = row["tokens_per_s"], row["steady_tokens_per_s"]
        gpu = row["gpu_percent"]
        lines.append(
            [
                str(row["load"]),
                f"{row['share']:g}",
                f"{row['decided']} of {row['generations']}",
                figure(row["seconds"]),
                figure(row["per_s"]),
                figure(speed, 0),
                f"{speed / floor:.1%}" if floor and speed else "",
                f"{steady / floor:.1%}" if floor and steady else "",
                "" if gpu is None else f"{gpu:.0f} %",
                ", ".join(f"{name} {count}" for name, count in row["verdicts"].items()),
            ]
        )
    head = ["load", "share", "verified", "s", "jobs/s", "tokens/s", "of the floor", "steady", "GPU busy", "verdicts"]
    return (
        "### As fast as it goes\n\nAll generations queued at once, from the first response's end to the last verdict. "
        "Of the floor = tokens per second ÷ `prefill` at the same load in the engine alone; steady leaves out the "
        "first and last tenth of the verdicts. GPU busy is the driver's figure.\n\n" + table(head, lines)
    )


def _cpu(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if not row["decided"]:
            continue
        for role in ROLES:
            used = row["cpu_s"][role]
            lines.append(
                [
                    str(row["load"]),
                    f"{row['share']:g}",
                    LABELS[role],
                    milliseconds(used / row["decided"]),
                    figure(1e6 * used / row["tokens"]),
                ]
            )
        ours = sum(row["cpu_s"][role] for role in ROLES if role != "engine")
        lines.append(
            [
                str(row["load"]),
                f"{row['share']:g}",
                "**all but the engine's own**",
                f"**{milliseconds(ours / row['decided'])}**",
                f"**{figure(1e6 * ours / row['tokens'])}**",
            ]
        )
    return (
        "### CPU per verified generation, one core\n\nUser and system time of each process over the phase above. The "
        "engine's own process polls, so its time says little.\n\n"
        + table(["load", "share", "process", "ms per generation", "µs per token"], lines)
    )


def _queueing(rows: Sequence[Row]) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: (row["load"], row["level"])):
        for what, name in (("queued_s", "queueing"), ("latency_s", "to the verdict")):
            found = row[what] or {}
            lines.append(
                [
                    str(row["load"]),
                    f"{row['level']:.0%}",
                    figure(row["rate"]),
                    name,
                    *(milliseconds(found.get(each)) for each in ("p50", "p90", "p95", "p99", "max")),
                    "" if row["gpu_percent"] is None else f"{row['gpu_percent']:.0f} %",
                    f"{found.get('n', 0):.0f}",
                ]
            )
    head = ["load", "of capacity", "arrivals/s", "delay", "p50 ms", "p90", "p95", "p99", "max", "GPU busy", "n"]
    return (
        "### Delay below capacity\n\nPoisson arrivals whatever the pool does; the first tenth is left out. To the "
        "verdict = everything after the response's end; queueing = what of it goes beyond the median of the same "
        "answers one at a time.\n\n" + table(head, lines)
    )


def _latency(rows: Sequence[Row], cells: Grid) -> str:
    by_cell: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in rows:
        by_cell[row["input_len"], row["output_len"]].append(row)
    lines = []
    for cell, each in sorted(by_cell.items()):
        whole = float(np.median([row["end_to_end_s"] for row in each]))
        times = cells.get(cell, {})
        ids, flat = times.get(IDS, Times()).median, times.get(FLAT, Times()).median
        lines.append(
            [
                f"{cell[0]} / {cell[1]}",
                milliseconds(whole),
                milliseconds(ids),
                milliseconds(flat),
                milliseconds(None if ids is None else whole - ids),
                str(len(each)),
            ]
        )
    head = ["in / out", "end to end ms", "`ids` in the engine", "`flat` in the engine", "the rest", "n"]
    return (
        "### One at a time, end to end\n\nFrom the response's end to the verdict's announcement, form `ids`, nothing "
        "else in the pool; beside it the time the reference is occupied. The rest = packing, Valkey, queues, CPU "
        "checks, judge.\n\n" + table(head, lines)
    )
