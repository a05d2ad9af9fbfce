"""What is said of overhead on real servers, read from results: tables and sentences of README.md and capacity.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness.markdown import figure
from benchmarks.harness.rows import Row
from benchmarks.harness.statistics import Figure
from benchmarks.overhead import agreement
from benchmarks.overhead.report import ROWS, read_rows
from benchmarks.overhead.samples import Arm, Samples, busy, each_token, events, gpu, pace, per, rounds
from benchmarks.overhead.steps import BYTES, DIRECT, PLAIN
from benchmarks.overhead.tables import added

RESULTS = Path("benchmarks/results/overhead")
SCRIPTED = "scripted"
NAMES = {"h200": "8B shape on the H200", "h200-verdicts": "135M model on the H200", "cpu": "135M model on the CPU"}
HEADS = {
    "h200": "an 8B shape on one H200 that backend and reference share",
    "h200-verdicts": "a 135M model on the same",
    "cpu": "a 135M model, served and replayed by 2 cores",
}
"""Folders of overhead on real servers, each with its tables' head; there are tables of those that were measured."""
ON_GPU = {"h200": "8B shape", "h200-verdicts": "135M model"}
"""Those of one chip, and what each serves."""
RELAYED, AFTER = Arm(PLAIN), Arm("async", 0.0)


@dataclass(frozen=True, slots=True)
class Results:
    """One folder."""

    samples: Samples
    rows: Sequence[Row]

    @property
    def cells(self) -> list[str]:
        """Its closed loops, fewest clients first."""
        return [cell for cell in self.samples.cells if cell.startswith("closed ")]

    @property
    def audited(self) -> Arm:
        """The arm of which most is replayed."""
        return Arm("async", max(arm.audit or 0.0 for arm in self.samples.arms))

    def clients(self, cell: str) -> float:
        """Of a closed loop."""
        return float(self.samples.of(cell, AFTER)[0]["at"])

    def bytes_down(self, arm: str) -> float:
        """Bytes that the backend sent per token; requests came one after the other."""
        mine = [row for row in self.rows if row["what"] == BYTES and row["arm"] == arm and not row["error"]]
        return float(sum(row["down"] for row in mine) / sum(row["tokens"] for row in mine))


def opened(root: Path, names: Sequence[str] = tuple(HEADS)) -> dict[str, Results]:
    """The folders that were measured. Raises CountersignError for what is no row."""
    found = {}
    for name in names:
        folder = root / RESULTS / name
        if (folder / ROWS).exists():
            rows = read_rows(folder)
            found[name] = Results(Samples(rows), rows)
    return found


def source(name: str) -> str:
    """What the comment in front of a folder's table says."""
    return str(RESULTS / name / "summary.md")


def latency(results: Results, head: str) -> str:
    """What each arm adds, by how many clients ask at once; and how long verdicts take. For the README."""
    samples, cells, audited = results.samples, results.cells, results.audited
    waiting = Arm("inline", audited.audit)
    lines = [
        ("first token, relayed only", RELAYED, "ttft_ms"),
        ("first token, verified after", AFTER, "ttft_ms"),
        (f"first token, {audited.audit:.0%} of answers replayed", audited, "ttft_ms"),
        ("whole answer, relayed only", RELAYED, "total_ms"),
        ("whole answer, verified after", AFTER, "total_ms"),
        (f"whole answer, {audited.audit:.0%} of answers replayed", audited, "total_ms"),
        ("whole answer with the verdict of its replay in it", waiting, "total_ms"),
    ]
    rows = [[name, *(_added(samples, cell, arm, metric) for cell in cells)] for name, arm, metric in lines]
    rows.append(["from the answer's end to the verdict of its replay", *_verdicts(results, audited, 0.5)])
    return table([f"{head}; milliseconds added, median", *_clients(results)], [row for row in rows if any(row[1:])])


def capacity(results: Results, head: str) -> str:
    """What a load takes on a real server, for capacity.md: speed, time, CPU, GPU and bytes."""
    samples, cells, audited = results.samples, results.cells, results.audited
    arms = ((Arm(DIRECT), "asked directly"), (RELAYED, "relayed only"), (AFTER, "verified after"))
    every = (audited, f"{audited.audit:.0%} replayed")

    def line(name: str, arm: Arm, value: Callable[[list[Row]], Figure | None], digits: int | None = 0) -> list[str]:
        found = [value(samples.of(cell, arm)) for cell in cells]
        return [name, *("" if each is None else figure(each.value, digits) for each in found)]

    def cpu(role: str) -> Callable[[list[Row]], Figure | None]:
        return lambda mine: per(mine, lambda row: row["cpu_ms"].get(role), _requests)

    rows = [line(f"tokens per second, {name}", arm, pace) for arm, name in (*arms, every)]
    for arm, name in (*arms[1:], every):
        for metric, what in (("ttft_ms", "first token"), ("total_ms", "whole answer")):
            rows.append([f"{what}, {name}, ms added", *(_added(samples, cell, arm, metric) for cell in cells)])
    for arm, name in ((AFTER, "without a replay"), (audited, "of a replay")):
        for q in (0.5, 0.99):
            rows.append([f"verdict {name}, p{100 * q:.0f}, ms after the answer", *_verdicts(results, arm, q)])
    rows += [line(f"proxy, % of one core, {name}", arm, busy, 1) for arm, name in arms[1:]]
    rows += [line(f"proxy, µs per token, {name}", arm, each_token) for arm, name in arms[1:]]
    rows += [
        line(f"CPU workers, seconds per 1,000 requests, {name}", arm, cpu("verify"), None)
        for arm, name in (arms[2], every)
    ]
    rows += [
        line(
            f"reference busy, seconds per 1,000 requests, {every[1]}",
            audited,
            lambda mine: per(mine, lambda row: row["replay_busy_ms"], _requests),
            None,
        )
    ]
    rows += [line(f"GPU at work, %, {name}", arm, gpu) for arm, name in (arms[0], arms[2])]
    sent = ((DIRECT, "asked directly"), ("async", "verified"))
    rows += [
        [f"the backend sends, bytes per token, {name}", f"{results.bytes_down(arm):,.0f}", *[""] * (len(cells) - 1)]
        for arm, name in sent
    ]
    return table([head, *_clients(results)], [row for row in rows if any(row[1:])])


def sentences(root: Path) -> list[str]:
    """What the README says of them: where the time goes when many clients ask one server."""
    found = opened(root, tuple(ON_GPU))
    if len(found) < len(ON_GPU):
        return []
    loads = {name: (results, results.cells[-1]) for name, results in found.items()}
    (at,) = {results.clients(cell) for results, cell in loads.values()}

    def told(value: Callable[[list[Row]], Figure | None], arm: Arm, digits: str = ",.0f") -> list[str]:
        return [format(_of(value, results, cell, arm).value, digits) for results, cell in loads.values()]

    speeds = list(zip(*(told(pace, arm) for arm in (Arm(DIRECT), RELAYED, AFTER)), strict=True))
    (first, second), (big, small) = speeds, ON_GPU.values()
    relaying, verifying = told(busy, RELAYED), told(busy, AFTER)
    idler = all(
        _of(busy, results, cell, AFTER).value < _of(busy, results, cell, RELAYED).value
        for results, cell in loads.values()
    )
    sent, plain = ([f"{each.bytes_down(arm):,.0f}" for each in found.values()] for arm in ("async", DIRECT))
    joined, apart = told(events, AFTER, ".2f"), told(events, Arm(DIRECT), ".2f")
    working, before = told(gpu, AFTER), told(gpu, Arm(DIRECT))
    extra = [_added(results.samples, cell, RELAYED, "total_ms") for results, cell in loads.values()]
    return [
        f"At {at:g} clients the {big}'s server gave {first[0]} tokens per second asked directly, {first[1]} relayed "
        f"only and {first[2]} verified; the {small}'s {second[0]}, {second[1]} and {second[2]}.",
        f"{'The proxy had time left' if idler else 'Of the proxy'}: it used {_both(verifying)} % of one core then, and "
        f"{_both(relaying)} % when it relayed only, which adds {_both(extra)} ms to a whole answer.",
        f"The servers sent {_both(sent)} bytes per token instead of {_both(plain)}, {_both(joined)} events per token "
        f"instead of {_both(apart)}, and the GPU was at work {_both(working)} % of the time instead of "
        f"{_both(before)} %.",
        *_scripted(root),
    ]


def _scripted(root: Path) -> list[str]:
    """What a backend without a model's work says of the proxy, at about the same speed."""
    samples = opened(root, (SCRIPTED,))[SCRIPTED].samples
    cell = max(
        (cell for cell in samples.cells if cell.startswith("burst ")),
        key=lambda cell: (samples.of(cell, AFTER)[0]["at"], max(samples.of(cell, AFTER)[0]["asked"])),
    )
    speed = pace(samples.of(cell, AFTER))
    assert speed is not None
    return [
        "the scripted backend, which has no such work, sends the same kind of evidence at "
        f"{speed.value:,.0f} tokens per second, and there the proxy adds "
        f"{_added(samples, cell, AFTER, 'total_ms')} ms to a whole answer."
    ]


def remarks(root: Path) -> list[str]:
    """What capacity.md says of them in words: verdicts, and how well the witness agrees."""
    found = opened(root)
    said = []
    for name, results in found.items():
        words = Counter(word for row in results.samples.rows for word in row["verdicts"] if word)
        counts = ", ".join(f"{count:,} `{word}`" for word, count in words.most_common())
        fewest, most = results.samples.rounds
        each = f"{most}" if fewest == most else f"{fewest} to {most}"
        said.append(f"Verdicts of the {NAMES[name]}, {each} rounds of each arm: {counts}.")
    return [*said, *(line for results in found.values() for line in witness(results.rows))]


def witness(rows: Sequence[Row]) -> list[str]:
    """How many times two load generators agree on; nothing where only one was heard."""
    heard = [(arm, time, agree) for arm, time, *_, agree in agreement.lines(rows) if agree]
    if not heard:
        return []
    apart = [f"{time} ({arm})" for arm, time, agree in heard if agree != "yes"]
    on = f"{len(heard) - len(apart)} of {len(heard)} times" if apart else f"all {len(heard)} times"
    return [f"agree within the noise of both on {on}{'; not on: ' + ', '.join(apart) if apart else ''}."]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As the pages have them."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def two(value: float) -> str:
    """Two significant digits; of a thousand and more all before the point."""
    digits = 1 - math.floor(math.log10(abs(value))) if value else 2
    return f"{value:,.{min(max(digits, 0), 2)}f}"


def _of(value: Callable[[list[Row]], Figure | None], results: Results, cell: str, arm: Arm) -> Figure:
    found = value(results.samples.of(cell, arm))
    assert found is not None
    return found


def _added(samples: Samples, cell: str, arm: Arm, metric: str) -> str:
    found = added(rounds(samples.beside(cell, arm), metric), rounds(samples.of(cell, arm), metric), 0.5)
    if found is None:
        return "none"
    return two(found.value) + (" (noise)" if found.low <= 0 <= found.high else "")


def _verdicts(results: Results, arm: Arm, q: float) -> list[str]:
    every = [
        [each for row in results.samples.of(cell, arm) for each in row["verdict_ms"] if each is not None]
        for cell in results.cells
    ]
    # A tail is told only where answers lie beyond it.
    return [f"{np.quantile(found, q):,.1f}" if len(found) * (1 - q) >= 1 else "" for found in every]


def _clients(results: Results) -> list[str]:
    return [f"{results.clients(cell):g} at once" for cell in results.cells]


def _requests(row: Row) -> float:
    return float(row["requests"])


def _both(pair: Sequence[str]) -> str:
    return " and ".join(pair)
