"""From rows to `rows.csv`, `bursts.csv`, `metadata.json` and `summary.md`."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.overhead.rounds import Cost, Row, as_dicts
from benchmarks.overhead.statistics import (
    Figure,
    Rounds,
    added_median,
    added_quantile,
    line,
    median_of_medians,
    spread,
)

LABELS = {"async": "proxied (async)", "inline": "proxied (inline)"}


@dataclass(frozen=True, slots=True)
class Result:
    """Everything a run measured. `tokens` is the length of the answers that are timed."""

    rows: Sequence[Row]
    costs: Sequence[Cost]
    tokens: int
    metadata: dict[str, Any]

    @property
    def arms(self) -> list[str]:
        """Arms besides `direct`, in the order of their names here."""
        return [arm for arm in LABELS if any(row.arm == arm for row in self.rows)]

    @property
    def concurrencies(self) -> list[int]:
        """Concurrencies that were timed."""
        return sorted({row.concurrency for row in self.rows if row.asked_tokens == self.tokens})

    @property
    def errors(self) -> Counter[tuple[str, str]]:
        """How often each arm met each error."""
        found = Counter((row.arm, row.error) for row in self.rows if row.error)
        for cost in self.costs:
            if cost.undecided:
                found[cost.arm, "burst ended without all verdicts"] += 1
        return found

    def samples(self, arm: str, concurrency: int, metric: str) -> Rounds:
        """A metric of all healthy requests, by round."""
        found: dict[int, list[float]] = {}
        for row in self.rows:
            if (row.arm, row.concurrency, row.asked_tokens) == (arm, concurrency, self.tokens) and not row.error:
                found.setdefault(row.round, []).append(getattr(row, metric))
        return {number: np.array(values) for number, values in found.items()}


def write(result: Result, folder: Path) -> str:
    """Write the four files; returns the summary's text."""
    folder.mkdir(parents=True, exist_ok=True)
    _csv(folder / "rows.csv", as_dicts(result.rows))
    _csv(folder / "bursts.csv", as_dicts(result.costs))
    (folder / "metadata.json").write_text(json.dumps(result.metadata, indent=2) + "\n")
    text = summary(result)
    (folder / "summary.md").write_text(text)
    return text


def summary(result: Result) -> str:
    """The summary, Markdown."""
    parts = [_head(result)]
    parts += [_latency(result, concurrency) for concurrency in result.concurrencies]
    parts += [_cpu(result), _errors(result), _notes(result)]
    return "\n\n".join(parts) + "\n"


def _csv(path: Path, rows: list[dict[str, object]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _head(result: Result) -> str:
    meta = result.metadata
    machine, arguments = meta["machine"], meta["arguments"]
    lines = [
        "# What Countersign adds to a request",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}; "
        f"commit {(machine['commit'] or 'unknown')[:12]}{' with changes' if machine['modified'] else ''}; "
        f"{meta['started']}, {meta['seconds']:.0f} s, {arguments['rounds']} rounds.",
    ]
    if meta["busy"]:
        lines += ["", f"**Busy machine**: load {meta['load_before']:.2f} before the start. Do not quote these figures."]
    if arguments["quick"]:
        lines += ["", "**Quick run**: too few samples to quote."]
    return "\n".join(lines)


def _latency(result: Result, concurrency: int) -> str:
    title = "One request at a time" if concurrency == 1 else f"{concurrency} streams at once"
    base = {metric: result.samples("direct", concurrency, metric) for metric in _METRICS}
    header = ["milliseconds", "direct", *(f"{LABELS[arm]} adds" for arm in result.arms)]
    table = [header, ["---"] * len(header)]
    for name, metric, q in _LATENCY_ROWS:
        cells = [name, _direct(base[metric], q)]
        for arm in result.arms:
            samples = result.samples(arm, concurrency, metric)
            cells.append(_added(base[metric], samples, q))
        table.append(cells)
    count = sum(map(len, base["ttft_ms"].values()))
    return f"## {title}\n\n{_table(table)}\n\n{count} requests per column."


_METRICS = ("ttft_ms", "total_ms", "gap_p50_ms", "gap_p99_ms", "gap_max_ms")
_LATENCY_ROWS: tuple[tuple[str, str, float], ...] = (
    ("first token, p50", "ttft_ms", 0.5),
    ("first token, p95", "ttft_ms", 0.95),
    ("first token, p99", "ttft_ms", 0.99),
    ("whole answer, p50", "total_ms", 0.5),
    ("whole answer, p99", "total_ms", 0.99),
    ("gap between tokens, p50", "gap_p50_ms", 0.5),
    ("gap between tokens, p99", "gap_p99_ms", 0.5),
    ("longest gap, p95", "gap_max_ms", 0.95),
)


def _direct(base: Rounds, q: float) -> str:
    if not base:
        return "none"
    if q == 0.5:
        return f"{median_of_medians(base).value:.2f}"
    return f"{np.quantile(np.concatenate(list(base.values())), q):.2f}"


def _added(base: Rounds, samples: Rounds, q: float) -> str:
    if not base.keys() & samples.keys():
        return "none"
    return (added_median(base, samples) if q == 0.5 else added_quantile(base, samples, q)).text()


def _cpu(result: Result) -> str:
    header = [
        "CPU",
        "streams",
        "proxy, µs per chunk",
        "of which per chunk alone",
        "and ms per request",
        "worker, ms per request",
        "last verdict after, ms",
    ]
    table = [header, ["---"] * len(header)]
    for arm in result.arms:
        for concurrency in result.concurrencies:
            costs = [cost for cost in result.costs if (cost.arm, cost.concurrency) == (arm, concurrency)]
            long = [cost for cost in costs if cost.asked_tokens == result.tokens]
            slope, intercept = _split(costs)
            table.append(
                [
                    LABELS[arm],
                    str(concurrency),
                    _per(long, lambda cost: 1000 * cost.proxy_cpu_ms, lambda cost: cost.chunks).text(0),
                    slope,
                    intercept,
                    _per(long, lambda cost: cost.worker_cpu_ms, lambda cost: cost.requests).text(1),
                    spread([cost.settle_ms for cost in long]).text(0),
                ]
            )
    peak = max(cost.proxy_peak_mib for cost in result.costs)
    return f"## CPU\n\n{_table(table)}\n\nThe proxy held at most {peak:.0f} MiB of memory."


def _per(costs: Sequence[Cost], value: Callable[[Cost], float], count: Callable[[Cost], float]) -> Figure:
    """Value per count, summed within rounds, median and quartiles over rounds."""
    rounds: dict[int, list[Cost]] = {}
    for cost in costs:
        rounds.setdefault(cost.round, []).append(cost)
    return spread([sum(map(value, group)) / max(sum(map(count, group)), 1) for group in rounds.values()])


def _split(costs: Sequence[Cost]) -> tuple[str, str]:
    """CPU per chunk (µs) and per request (ms) from bursts of long and short answers, round by round."""
    points: dict[int, list[tuple[float, float]]] = {}
    for cost in costs:
        point = (cost.chunks / cost.requests, cost.proxy_cpu_ms / cost.requests)
        points.setdefault(cost.round, []).append(point)
    lines = [line(found) for found in points.values() if len({x for x, _ in found}) > 1]
    if not lines:
        return "", ""
    return (
        spread([1000 * slope for slope, _ in lines]).text(0),
        spread([intercept for _, intercept in lines]).text(2),
    )


def _errors(result: Result) -> str:
    verdicts = Counter(row.verdict for row in result.rows if row.verdict)
    said = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()) or "none"
    lines = [f"{sum(result.errors.values())} errors in {len(result.rows)} requests. Verdicts: {said}."]
    lines += [f"* {arm}: {error}, {count} times" for (arm, error), count in result.errors.most_common()]
    return "## Errors\n\n" + "\n".join(lines)


def _notes(result: Result) -> str:
    arguments = result.metadata["arguments"]
    if arguments["upstream"]:
        backend = (
            "The backend is a real vLLM. Its own work for top-20 logprobs, which the direct arm does not ask for, "
            "is in the figures; so is whatever else it was doing."
        )
    else:
        backend = (
            f"The backend is a script: {result.tokens} tokens, the first after {arguments['first_ms']:g} ms, then one "
            f"every {arguments['interval_ms']:g} ms. Asked for evidence it sends top-20 logprobs and token ids, as "
            "vLLM does, otherwise the plain stream; so the figures hold the reading of the larger frames but not a "
            "model's work for them. A script this fast overstates capacity."
        )
    replay = (
        f"Every answer is replayed by the reference at {arguments['reference']}; inline waits for it."
        if arguments["reference"]
        else "No reference is configured (audit rate 0): inline waits for the CPU checks `structure` and `selection` "
        "only. A replay would add its own time to `whole answer` in the inline column, and to nothing else."
    )
    return f"## How to read this\n\n{_METHOD}\n\n{backend}\n\n{replay}\n\n{_LIMITS}"


_METHOD = """\
Times are taken at the client's socket, from the moment a request was due, connections being open already. Bursts of
all arms are shuffled inside each round. A p50 row is the median over rounds of (arm's median − direct's median) of
that round, with its quartiles; other quantiles are differences over all requests, with quartiles from drawing
whole rounds anew. Gap rows are taken inside each request first. CPU is what the kernel counted for the processes of
`countersign serve` and `countersign worker` from the request to the last verdict, Redis not included; the split comes
from bursts of short answers beside the long ones."""

_LIMITS = """\
Client, backend, proxy, worker and Redis (embedded Valkey, Unix socket) share this one machine over loopback, without
TLS. Not in the figures: network between machines, the reference's GPU time, webhooks."""


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
