"""A run's rows as samples by load, arm, audit rate and round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.harness.statistics import Figure, Rounds, line, median
from benchmarks.overhead.steps import ARMS, DIRECT, PLAIN, QUIET_SECONDS, STEP, VERIFIED

LABELS = {PLAIN: "relayed only", "async": "verified after", "inline": "verified before the end"}
TOKEN = "token_ms"
"""The time of each token behind the first, of a whole answer (`rounds`)."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One column: an arm, and the share of answers that was replayed meanwhile; None where that is none of its."""

    name: str
    audit: float | None = None

    @property
    def label(self) -> str:
        """In a table."""
        if self.audit is None:
            return LABELS.get(self.name, self.name)
        return f"{LABELS[self.name]}, audit {self.audit:.0%}"


class Samples:
    """The steps of a run."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = [row for row in rows if row["what"] == STEP and not row["error"]]
        audits = sorted({row["audit"] for row in self.rows})
        named = {row["arm"] for row in self.rows}
        self.arms = [Arm(PLAIN)] if PLAIN in named else []
        self.arms += [Arm(name, audit) for name in ARMS if name in named & set(VERIFIED) for audit in audits]
        places = {row["cell"]: (row["kind"], row["at"], row["mix"]) for row in self.rows}
        self.cells = sorted(places, key=lambda cell: places[cell])

    def of(self, cell: str, arm: Arm) -> list[Row]:
        """Rows of an arm."""
        return [
            row
            for row in self.rows
            if row["cell"] == cell and row["arm"] == arm.name and arm.audit in (None, row["audit"])
        ]

    def beside(self, cell: str, arm: Arm) -> list[Row]:
        """Rows of `direct` that were measured in the same minutes."""
        return self.of(cell, Arm(DIRECT, arm.audit))

    @property
    def failures(self) -> Counter[tuple[str, str]]:
        """How often each arm met each error."""
        found = Counter((row["arm"], error) for row in self.rows for error in row["errors"] if error)
        for row in self.rows:
            if row["undecided"]:
                found[row["arm"], "a step ended without all verdicts"] += 1
        return found

    @property
    def requests(self) -> int:
        """Of all arms."""
        return sum(row["requests"] for row in self.rows)

    @property
    def rounds(self) -> tuple[int, int]:
        """In how many an arm was measured: the one with fewest, of any load, and the one with most."""
        found = [each for cell in self.cells for each in self.counted(cell).values() if each]
        return (min(found), max(found)) if found else (0, 0)

    def counted(self, cell: str) -> dict[Arm, int]:
        """In how many rounds each arm was measured, `direct` beside it at every audit rate that it is compared at."""
        audits = sorted({row["audit"] for row in self.rows})
        direct = min(len({row["round"] for row in self.of(cell, Arm(DIRECT, audit))}) for audit in audits)
        mine = {arm: len({row["round"] for row in self.of(cell, arm)}) for arm in self.arms}
        return {Arm(DIRECT): direct} | mine


def rounds(rows: Sequence[Row], metric: str) -> Rounds:
    """A metric of all healthy requests, by round and audit rate: what was measured in the same minutes. Of `token_ms`
    rows hold what it is made of: the time from the first token to the last by the tokens behind the first, of which one
    event may bring several.
    """
    found: dict[int, list[float]] = {}
    for row in rows:
        every = _token_ms(row) if metric == TOKEN else row[metric]
        values = [value for value, error in zip(every, row["errors"], strict=True) if not error and value is not None]
        if values:
            found.setdefault(row["round"] * 10_000 + round(1000 * row["audit"]), []).extend(values)
    return {number: np.array(values) for number, values in found.items()}


def _token_ms(row: Row) -> list[float | None]:
    return [
        None if first is None or total is None or tokens < 2 else (total - first) / (tokens - 1)
        for first, total, tokens in zip(row["ttft_ms"], row["total_ms"], row["asked"], strict=True)
    ]


def per(rows: Sequence[Row], value: Callable[[Row], float | None], count: Callable[[Row], float]) -> Figure | None:
    """Value per count, summed within rounds, median over rounds; None of nothing, and of what was not measured."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        if value(row) is not None:
            groups.setdefault(row["round"], []).append(row)
    sums = [(sum(value(row) or 0.0 for row in group), sum(map(count, group))) for group in groups.values()]
    ratios = [total / counted for total, counted in sums if counted]
    return median(ratios) if ratios else None


def serving(row: Row) -> float:
    """Seconds in which a step's requests ran: all but the wait for verdicts and the quiet after it."""
    return float(row["seconds"] - row["settle_ms"] / 1000 - QUIET_SECONDS)


def proxy_ms(row: Row) -> float:
    """CPU of the proxy that a step's requests went through; what it did after their end, such as recording, is in it.

    The one that relays only is a process of its own.
    """
    return float(row["cpu_ms"][PLAIN if row["arm"] == PLAIN else "proxy"])


def busy(rows: Sequence[Row]) -> Figure | None:
    """Percent of one core that the proxy used while requests ran."""
    return per(rows, lambda row: proxy_ms(row) / 10, serving)


def each_token(rows: Sequence[Row]) -> Figure | None:
    """Microseconds of the proxy's CPU per token, those per request shared out."""
    return per(rows, lambda row: 1000 * proxy_ms(row), tokens)


def gpu(rows: Sequence[Row]) -> Figure | None:
    """Percent of the time in which the GPU had anything to do; None where there is none."""
    return per(rows, lambda row: None if row["gpu_percent"] is None else row["gpu_percent"] * serving(row), serving)


def pace(rows: Sequence[Row]) -> Figure | None:
    """Tokens a second of all clients together, while requests ran."""
    return per(rows, tokens, serving)


def events(rows: Sequence[Row]) -> Figure | None:
    """Events of the stream per token: below 1 where a server puts several tokens into one."""
    return per(rows, chunks, tokens)


def tokens(row: Row) -> int:
    """Tokens that a step's answers had; an answer of another length is an error."""
    return int(sum(row["asked"]))


def chunks(row: Row) -> int:
    """Events with tokens that came in a step."""
    return int(sum(row["chunks"]))


def split(rows: Sequence[Row]) -> tuple[Figure, Figure] | None:
    """The proxy's CPU per chunk (µs) and per request (ms), by round, from steps with answers of several lengths.

    None where all are of one length.
    """
    points: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        if chunks(row):
            point = (chunks(row) / row["requests"], row["cpu_ms"]["proxy"] / row["requests"])
            points.setdefault(row["round"], []).append(point)
    lines = [line(found) for found in points.values() if len({x for x, _ in found}) > 1]
    if not lines:
        return None
    return median([1000 * slope for slope, _ in lines]), median([intercept for _, intercept in lines])
