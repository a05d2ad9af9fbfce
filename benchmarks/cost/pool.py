"""The whole pool under load: queue to verdict, one at a time, as fast as it goes, and at shares of that."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.cost.feeding import Fed, Feeder, words
from benchmarks.cost.rows import Rows
from benchmarks.cost.stack import ROLES, Pool
from benchmarks.harness.progress import Bar, Clock
from benchmarks.harness.rows import Row, told
from benchmarks.harness.usage import Gpu
from policies.evidence import Evidence

LATENCY, CAPACITY, QUEUEING = "latency", "capacity", "queueing"
PHASE = "phase"
"""Kind of work of the last two, for the clock."""
LEVELS = (0.5, 0.8, 0.95)
"""Shares of the measured capacity at which queue delays are measured."""
PATIENCE = 60.0
"""Seconds without any verdict after which the rest counts as missing."""
FIRST_PART = 0.1
"""Share of an open-loop phase whose arrivals are left out of its percentiles: the queue is still filling."""
ALONE = 9
"""Generations that say how long a verdict takes when nothing else is in the pool."""


@dataclass(frozen=True, slots=True)
class Supply:
    """Answers to feed: one load's, or one cell's, again and again."""

    name: str
    answers: tuple[Evidence, ...]

    @property
    def tokens_each(self) -> float:
        """Mean tokens of prompt and answer."""
        return float(np.mean([len(each.prompt_ids) + len(each.output_ids) for each in self.answers]))

    def __getitem__(self, number: int) -> Evidence:
        return self.answers[number % len(self.answers)]


@dataclass
class Phases:
    """Runs the phases of a started pool; every phase is one row, or, at one at a time, every generation is.

    What breaks off is a row with its error, too.

    Args:
        seconds: how long a phase should take.
        share: of the audits, whose replay also takes the reference's own top 20 (`audit.full`).
        waiting: how many phases have no row yet, those of other shares among them.
    """

    pool: Pool
    feeder: Feeder
    gpu: Gpu
    rows: Rows
    clock: Clock
    bar: Bar
    seconds: float
    share: float
    seed: int
    known: set[tuple[Any, ...]] = field(default_factory=set)
    waiting: int = 0

    def __post_init__(self) -> None:
        self._of = self.waiting

    async def latency(self, cells: Sequence[tuple[tuple[int, int], Evidence]], repeats: int) -> None:
        """One generation at a time, from the end of its response to its verdict."""
        for place, (cell, evidence) in enumerate(cells):
            each = self.clock.expected(LATENCY, 1)
            left = None if each is None else each * repeats * (len(cells) - place) + self._left()
            self.bar.show(f"latency {cell[0]}/{cell[1]}", place, len(cells), left)
            for number in range(repeats):
                if (LATENCY, *cell, number) in self.known or not self.clock.fits(LATENCY, 1):
                    continue
                row: Row = {"phase": LATENCY, "input_len": cell[0], "output_len": cell[1], "iter": number}
                row |= {"share": self.share, "end_to_end_s": None, "verdict": ""}
                began = time.monotonic()
                try:
                    fed = await self.feeder.feed(evidence)
                    await self.feeder.settle(PATIENCE)
                    await self.feeder.look_up([fed])
                except Exception as error:
                    self.rows.append(row | {"error": told(error)})
                    raise
                self.clock.learn(LATENCY, 1, time.monotonic() - began)
                row |= {"end_to_end_s": fed.latency, "verdict": fed.verdict}
                self.rows.append(row | {"error": "" if fed.decided is not None else "no verdict"})

    async def capacity(self, supply: Supply, count: int, *, warm: bool = False) -> Row:
        """All of `count` generations at once, until the last verdict. `warm` marks a run that only warms up."""
        with self._phase(CAPACITY, supply, counts=not warm, warm=warm):
            before, began = self.pool.cpu(), time.monotonic()
            fed = [await self.feeder.feed(supply[number]) for number in range(count)]
            await self.feeder.settle(PATIENCE)
            row = await self._row(CAPACITY, supply, fed, before, began)
        row |= {"offered_s": fed[-1].sent - fed[0].sent, "warm": warm}
        self.rows.append(row)
        return row

    async def queueing(self, supply: Supply, capacity: float, level: float) -> Row:
        """Poisson arrivals at a share of the capacity (generations a second), whatever the pool does."""
        with self._phase(QUEUEING, supply, level=level, rate=capacity * level, queued_s=None):
            row = await self._arrivals(supply, capacity, level)
        self.rows.append(row)
        return row

    async def _arrivals(self, supply: Supply, capacity: float, level: float) -> Row:
        alone = await self._alone(supply)
        rng = np.random.default_rng([self.seed, round(1000 * level)])
        expected = max(capacity * level * self.seconds, 8)
        arrivals = np.cumsum(rng.exponential(1 / (capacity * level), math.ceil(expected)))
        before, began = self.pool.cpu(), time.monotonic()
        fed: list[Fed] = []
        late = 0.0
        for number, at in enumerate(arrivals):
            wait = began + at - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            late = max(late, -wait)
            fed.append(await self.feeder.feed(supply[number]))
        await self.feeder.settle(PATIENCE)
        row = await self._row(QUEUEING, supply, fed, before, began)
        counted = fed[int(len(fed) * FIRST_PART) :]
        row |= {
            "level": level,
            "rate": capacity * level,
            "late_s": late,
            "alone_s": alone,
            "latency_s": _quantiles([one.latency for one in counted]),
            "queued_s": _quantiles([max(one.latency - alone, 0.0) for one in counted if one.latency is not None]),
        }
        return row

    @contextlib.contextmanager
    def _phase(self, phase: str, supply: Supply, *, counts: bool = True, **more: Any) -> Iterator[None]:
        """Says how far the run is, and keeps what broke a phase off."""
        what = f"{more['level']:.0%} load" if "level" in more else phase
        self.bar.show(f"{what} {supply.name}, share {self.share:g}", self._of - self.waiting, self._of, self._left())
        began = self.clock.elapsed
        try:
            yield
        except Exception as error:
            self.rows.append(_broken(phase, supply, self.share) | more | {"error": told(error)})
            raise
        if counts:
            self.clock.learn(PHASE, 1, self.clock.elapsed - began)
            self.waiting -= 1

    def _left(self) -> float:
        """Seconds that all phases without a row take, at the pace of those before, or as long as they should."""
        return self.waiting * (self.clock.expected(PHASE, 1) or self.seconds)

    async def _alone(self, supply: Supply) -> float:
        """Median seconds to the verdict of some of these answers, one at a time."""
        alone = []
        for number in range(ALONE):
            fed = await self.feeder.feed(supply[number])
            await self.feeder.settle(PATIENCE)
            if fed.latency is not None:
                alone.append(fed.latency)
        return float(np.median(alone)) if alone else 0.0

    async def _row(self, phase: str, supply: Supply, fed: Sequence[Fed], before: dict[str, float], began: float) -> Row:
        decided = sorted(one.decided for one in fed if one.decided is not None)
        ended = began + (decided[-1] - fed[0].sent if decided else 0.0)
        after = self.pool.cpu()
        await self.feeder.look_up(fed)
        seconds = ended - began
        tokens = sum(one.tokens for one in fed if one.decided is not None)
        return {
            "phase": phase,
            "load": supply.name,
            "share": self.share,
            "generations": len(fed),
            "decided": len(decided),
            "tokens": tokens,
            "seconds": seconds,
            "per_s": len(decided) / seconds if seconds else None,
            "tokens_per_s": tokens / seconds if seconds else None,
            "steady_tokens_per_s": _steady(fed),
            "verdicts": words(fed),
            "latency_s": _quantiles([one.latency for one in fed]),
            "cpu_s": {role: after[role] - before[role] for role in ROLES},
            "gpu_percent": self.gpu.mean(began + 0.1 * seconds, began + 0.9 * seconds),
            "error": "" if len(decided) == len(fed) else f"{len(fed) - len(decided)} without a verdict",
        }


def _broken(phase: str, supply: Supply, share: float) -> Row:
    """A phase of which nothing came."""
    measured = ("seconds", "per_s", "tokens_per_s", "steady_tokens_per_s", "latency_s", "gpu_percent")
    none = {"generations": 0, "decided": 0, "tokens": 0, "verdicts": {}, "cpu_s": dict.fromkeys(ROLES, 0.0)}
    return {"phase": phase, "load": supply.name, "share": share, **none, **dict.fromkeys(measured)}


def _steady(fed: Sequence[Fed]) -> float | None:
    """Tokens a second between the first and the last tenth of the verdicts: without filling up and running dry."""
    done = sorted((one.decided, one.tokens) for one in fed if one.decided is not None)
    low, high = len(done) // 10, len(done) - 1 - len(done) // 10
    if high <= low or done[high][0] <= done[low][0]:
        return None
    return sum(tokens for _, tokens in done[low + 1 : high + 1]) / (done[high][0] - done[low][0])


def _quantiles(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    names = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {"n": float(len(known))} | {name: float(np.quantile(known, q)) for name, q in names.items()}
