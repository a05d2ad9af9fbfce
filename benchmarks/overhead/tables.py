"""The tables of the report on what a request costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.harness.markdown import figure, table
from benchmarks.harness.rows import Row
from benchmarks.harness.statistics import (
    Figure,
    Rounds,
    added_median,
    added_quantile,
    median_of_medians,
    quantile,
)
from benchmarks.overhead.cells import title
from benchmarks.overhead.samples import (
    LABELS,
    TOKEN,
    Arm,
    Samples,
    busy,
    chunks,
    each_token,
    events,
    gpu,
    pace,
    per,
    rounds,
    split,
)
from benchmarks.overhead.steps import ARMS, BYTES, DIRECT, INLINE, PLAIN

LATENCY: tuple[tuple[str, str, float], ...] = (
    ("first token, p50", "ttft_ms", 0.5),
    ("first token, p95", "ttft_ms", 0.95),
    ("first token, p99", "ttft_ms", 0.99),
    ("whole answer, p50", "total_ms", 0.5),
    ("whole answer, p99", "total_ms", 0.99),
    ("each further token, p50", TOKEN, 0.5),
    ("gap between events, p50", "gap_p50_ms", 0.5),
    ("gap between events, p99", "gap_p99_ms", 0.5),
    ("longest gap, p95", "gap_max_ms", 0.95),
)
FEWEST_FOR_TAIL = 100
"""Requests without which no 99th percentile is told, and a fifth of them for a 95th."""


def added(base: Rounds, arm: Rounds, q: float) -> Figure | None:
    """What an arm adds; None where the two share no round, or there are too few requests for such a tail."""
    if not base.keys() & arm.keys() or not tells(base, q) or not tells(arm, q):
        return None
    return added_median(base, arm) if q == 0.5 else added_quantile(base, arm, q)


def tells(samples: Rounds, q: float) -> bool:
    """Whether there are samples enough for a quantile."""
    return sum(map(len, samples.values())) >= (1 if q == 0.5 else (1 - 0.99) / (1 - q) * FEWEST_FOR_TAIL)


def latency(samples: Samples, cell: str) -> str:
    """What each arm adds to each time of one kind of load."""
    first = samples.of(cell, Arm(DIRECT))[0]
    arms = [arm for arm in samples.arms if samples.of(cell, arm)]
    lines = []
    for name, metric, q in LATENCY:
        base = rounds(samples.of(cell, Arm(DIRECT)), metric)
        cells = [name, _direct(base, q)]
        for arm in arms:
            found = added(rounds(samples.beside(cell, arm), metric), rounds(samples.of(cell, arm), metric), q)
            cells.append("" if found is None else found.text())
        lines.append(cells)
    counts = [sum(row["requests"] for row in samples.of(cell, arm)) for arm in (Arm(DIRECT), *arms)]
    lines.append(["requests", *map(str, counts)])
    known = samples.counted(cell)
    lines.append(["rounds", *(str(known[arm]) for arm in (Arm(DIRECT), *arms))])
    head = ["milliseconds", "direct", *(f"{arm.label} adds" for arm in arms)]
    return f"## {title(first['kind'], first['at'], first['mix'])}\n\n{table(head, lines)}"


def _direct(base: Rounds, q: float) -> str:
    if not base or not tells(base, q):
        return ""
    return f"{(median_of_medians(base) if q == 0.5 else quantile(base, q)).value:,.2f}"


def short(samples: Samples) -> str:
    """What most readers want to know."""
    lines = []
    for cell in samples.cells:
        for arm in samples.arms:
            mine, base = samples.of(cell, arm), samples.beside(cell, arm)
            if mine and base:
                figures = [
                    added(rounds(base, metric), rounds(mine, metric), 0.5) for metric in ("ttft_ms", TOKEN, "total_ms")
                ]
                lines.append([_place(mine[0]), arm.label, *("" if each is None else each.text() for each in figures)])
    head = ["load", "arm", "first token adds, ms", "each further token adds, ms", "whole answer adds, ms"]
    return "## In short\n\nMedians with 95 % intervals.\n\n" + table(head, lines)


def _place(row: Row) -> str:
    return f"{row['kind']} {row['at']:g}, {row['mix']}"


def verdicts(samples: Samples) -> str:
    """How long verdicts take, and what they are."""
    lines = []
    for cell in samples.cells:
        for arm in samples.arms:
            mine = samples.of(cell, arm)
            found = [value for row in mine for value in row["verdict_ms"] if value is not None]
            if arm.name in (PLAIN, INLINE) or not found:
                continue
            words = Counter(word for row in mine for word in row["verdicts"] if word)
            times = [f"{np.quantile(found, q):,.1f}" for q in (0.5, 0.9, 0.99, 1.0)]
            said = ", ".join(f"{count} {word}" for word, count in words.most_common())
            lines.append([_place(mine[0]), f"{arm.audit:.0%}", *times, str(len(found)), said])
    if not lines:
        return ""
    text = (
        "## Until the verdict\n\nMilliseconds from the last byte at the client to the verdict's announcement, of "
        "answers that do not wait for it. Where few answers are replayed, those are the tail."
    )
    return f"{text}\n\n" + table(["load", "audit", "p50", "p90", "p99", "longest", "n", "verdicts"], lines)


def occupied(samples: Samples) -> str:
    """How busy the proxy was, beside what the backend sent meanwhile."""
    lines = []
    with_gpu = any(row["gpu_percent"] is not None for row in samples.rows)
    for cell in samples.cells:
        for arm in (Arm(DIRECT), *samples.arms):
            mine = samples.of(cell, arm)
            if not mine:
                continue
            found = [pace(mine), events(mine)]
            # Requests that go straight to the backend leave the proxy alone.
            found += [None, None] if arm.name == DIRECT else [busy(mine), each_token(mine)]
            if with_gpu:
                found.append(gpu(mine))
            shown = [
                "" if each is None else f"{each.value:,.{digits}f}"
                for each, digits in zip(found, (0, 2, 1, 0, 0), strict=False)
            ]
            lines.append([_place(mine[0]), arm.label, *shown])
    text = (
        "## How busy the proxy was\n\nWhile requests ran: tokens of all clients, and the proxy's CPU. What it still "
        "did after the last byte, such as recording, counts as well. Below one event per token, several tokens came in "
        f"one event.{_GPU if with_gpu else ''}"
    )
    head = ["load", "arm", "tokens per second", "events per token", "proxy, % of one core", "proxy, µs per token"]
    return f"{text}\n\n" + table([*head, *(["GPU at work, %"] if with_gpu else [])], lines)


_GPU = " The GPU was at work while any kernel ran, the replays' included, until the last verdict."

Value = Callable[[Row], float | None]

_COSTS: tuple[tuple[str, Value], ...] = (
    ("proxy", lambda row: row["cpu_ms"].get("proxy")),
    ("CPU workers", lambda row: row["cpu_ms"].get("verify")),
    ("replay process", lambda row: row["cpu_ms"].get("replay")),
    ("Valkey", lambda row: row["cpu_ms"].get("store")),
    ("engine's CPU", lambda row: row["cpu_ms"].get("engine")),
    ("reference busy", lambda row: row["replay_busy_ms"]),
)


def costs(samples: Samples) -> str:
    """Seconds per 1,000 requests: milliseconds per request are the same number."""
    lines = []
    for cell in samples.cells:
        for arm in samples.arms:
            mine = samples.of(cell, arm)
            if mine:
                roles = [_role(name, value, arm) for name, value in _COSTS]
                found = [per(mine, value, lambda row: float(row["requests"])) for value in roles]
                lines.append(
                    [_place(mine[0]), arm.label, *("" if each is None else figure(each.value) for each in found)]
                )
    text = (
        "## Seconds per 1,000 requests\n\nCPU that the kernel counted for each process until the last verdict, and how "
        "long the reference had anything to replay. Median over rounds."
    )
    return f"{text}\n\n" + table(["load", "arm", *(name for name, _ in _COSTS)], lines)


def _role(name: str, value: Value, arm: Arm) -> Value:
    """The proxy that relays only is a process of its own."""
    return (lambda row: row["cpu_ms"].get(PLAIN)) if (name, arm.name) == ("proxy", PLAIN) else value


def chunk_costs(samples: Samples) -> str:
    """What a chunk and a request cost the proxy, where answers of several lengths tell that."""
    lines = []
    loads = list(dict.fromkeys((row["kind"], row["at"]) for row in samples.rows))
    for kind, at in loads:
        for arm in samples.arms:
            cells = [cell for cell in samples.cells if cell.startswith(f"{kind} {at:g} ")]
            mine = [row for cell in cells for row in samples.of(cell, arm)]
            found = split(mine) if arm.name != PLAIN else None
            if found is None:
                continue
            longest = max(mine, key=lambda row: chunks(row) / row["requests"])["cell"]
            long = [row for row in mine if row["cell"] == longest]
            whole = per(long, lambda row: 1000 * row["cpu_ms"]["proxy"], chunks)
            worker = per(long, lambda row: row["cpu_ms"]["verify"], lambda row: row["requests"])
            assert whole is not None
            assert worker is not None
            lines.append(
                [arm.label, f"{kind} {at:g}", whole.text(0), found[0].text(0), found[1].text(2), worker.text(1)]
            )
    if not lines:
        return ""
    peak = max(row["proxy_peak_mib"] for row in samples.rows)
    head = [
        "CPU",
        "load",
        "proxy, µs per chunk",
        "of which per chunk alone",
        "and ms per request",
        "worker, ms per request",
    ]
    return f"## CPU per chunk\n\n{table(head, lines)}\n\nThe proxy held at most {peak:.0f} MiB of memory."


def traffic(samples: Samples, rows: Sequence[Row]) -> str:
    """Bytes per request between proxy and backend, and in and out of Valkey."""
    lines = []
    counted = [row for row in rows if row["what"] == BYTES and not row["error"]]
    for row in sorted(counted, key=lambda row: (row["mix"], ARMS.index(row["arm"]))):
        lines.append(
            [
                row["mix"],
                LABELS.get(row["arm"], row["arm"]),
                f"{row['up'] / row['requests']:,.0f}",
                f"{row['down'] / row['requests']:,.0f}",
                f"{row['down'] / row['tokens']:,.0f}",
            ]
        )
    parts = []
    if lines:
        head = ["prompt/answer", "arm", "to the backend, bytes per request", "from it", "from it, per token"]
        parts.append("### Upstream\n\n" + table(head, lines))
    stored = _stored(samples)
    if stored:
        head = ["load", "arm", "sent to Valkey, bytes per request", "read from it", "kept", "commands"]
        text = (
            "Kept = growth of its memory, evidence and verdicts. What idle processes say meanwhile is in all of it: "
            "`relayed only`, of which nothing is verified, shows how much that is."
        )
        parts.append(f"### Valkey\n\n{text}\n\n" + table(head, stored))
    return "\n\n".join(["## Bytes", *parts]) if parts else ""


def _stored(samples: Samples) -> list[list[str]]:
    lines = []
    for cell in samples.cells:
        for arm in samples.arms:
            mine = [row for row in samples.of(cell, arm) if row["store"]]
            if mine:
                found = [
                    per(mine, lambda row, name=name: row["store"][name], lambda row: row["requests"])  # type: ignore[misc]
                    for name in ("in", "out", "kept", "commands")
                ]
                shown = ["" if each is None else f"{each.value:,.0f}" for each in found]
                lines.append([_place(mine[0]), arm.label, *shown])
    return lines


def errors(samples: Samples, broken: Sequence[Row]) -> str:
    """What went wrong: of requests, and what broke off whole."""
    found = samples.failures
    words = Counter(word for row in samples.rows for word in row["verdicts"] if word)
    said = ", ".join(f"{count} {word}" for word, count in words.most_common()) or "none"
    lines = [f"{sum(found.values())} errors in {samples.requests} requests. Verdicts: {said}."]
    lines += [f"* {arm}: {error}, {count} times" for (arm, error), count in found.most_common()]
    lines += [f"* {row['arm']}, {row.get('cell', row['what'])}, broke off: {row['error']}" for row in broken]
    return "## Errors\n\n" + "\n".join(lines)
