"""The measurement: bursts of every arm in random order inside each round, one row per request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import orjson

from benchmarks.overhead.client import Target, Timed, burst
from benchmarks.overhead.machine import cpu_seconds, memory_bytes
from benchmarks.overhead.stack import Stack
from benchmarks.overhead.wire import Response

SETTLE_SECONDS = 20.0
QUIET_SECONDS = 0.03
ARMS = ("direct", "async", "inline")


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of burst: so many requests of so many tokens, their starts spread over `spread` seconds."""

    concurrency: int
    tokens: int
    bursts: int
    spread: float


@dataclass(frozen=True, slots=True)
class Row:
    """One request. Times in milliseconds; `error` is empty when all is well."""

    round: int
    burst: int
    concurrency: int
    asked_tokens: int
    arm: str
    chunks: int
    ttft_ms: float
    total_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    verdict: str
    error: str


@dataclass(frozen=True, slots=True)
class Cost:
    """One burst: CPU milliseconds of the proxy and worker processes until the last verdict, and the proxy's memory.

    `undecided` counts generations of this benchmark that had no verdict when patience ended.
    """

    round: int
    burst: int
    concurrency: int
    asked_tokens: int
    arm: str
    requests: int
    chunks: int
    proxy_cpu_ms: float
    worker_cpu_ms: float
    settle_ms: float
    undecided: int
    proxy_peak_mib: float


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a healthy answer looks like; `text` is None when only the backend knows."""

    text: Callable[[int], str] | None


class Bench:
    """Runs warm-ups and rounds against a started stack.

    Args:
        arms: which of `ARMS`, `direct` among them.
        seed: of the order of bursts and of the arrival times.
        timeout: seconds a request may take.
    """

    def __init__(
        self, stack: Stack, arms: Sequence[str], *, seed: int, expect: Expectation, timeout: float = 120.0
    ) -> None:
        self._stack = stack
        self._arms = arms
        self._rng = np.random.default_rng(seed)
        self._expect = expect
        self._timeout = timeout
        self._bursts = 0
        self.rows: list[Row] = []
        self.costs: list[Cost] = []

    async def warm_up(self, loads: Sequence[Load]) -> None:
        """One burst of every arm and load that counts nowhere. Raises CountersignError when a process ended."""
        for load in loads:
            for arm in self._arms:
                await self._burst(0, arm, load)
        self.rows.clear()
        self.costs.clear()

    async def round(self, number: int, loads: Sequence[Load]) -> None:
        """Every burst of one round, shuffled."""
        plan = [(arm, load) for load in loads for arm in self._arms for _ in range(load.bursts)]
        for position in self._rng.permutation(len(plan)):
            await self._burst(number, *plan[position])

    async def _burst(self, number: int, arm: str, load: Load) -> None:
        self._stack.check()
        self._bursts += 1
        offsets = np.sort(self._rng.uniform(0.0, load.spread, load.concurrency))
        before = self._cpu()
        timed = await burst(self._target(arm, load.tokens), offsets, self._timeout)
        settle, undecided = self._settle() if arm != "direct" else (0.0, 0)
        await asyncio.sleep(QUIET_SECONDS)
        after = self._cpu()
        verdicts = self._stack.verdicts([one.id for one in timed if one.id])
        rows = [self._row(number, arm, load, one, verdicts.get(one.id, "")) for one in timed]
        self.rows += rows
        self.costs.append(
            Cost(
                round=number,
                burst=self._bursts,
                concurrency=load.concurrency,
                asked_tokens=load.tokens,
                arm=arm,
                requests=len(rows),
                chunks=sum(row.chunks for row in rows),
                proxy_cpu_ms=(after[0] - before[0]) * 1000,
                worker_cpu_ms=(after[1] - before[1]) * 1000,
                settle_ms=settle * 1000,
                undecided=undecided,
                proxy_peak_mib=memory_bytes(self._stack.pid("proxy")) / 2**20,
            )
        )

    def _target(self, arm: str, tokens: int) -> Target:
        request = {
            "model": self._stack.backend.model,
            "messages": [{"role": "user", "content": "Write a long story about a lighthouse."}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        base = self._stack.backend.url if arm == "direct" else self._stack.proxy_url
        headers = {} if arm == "direct" else {"x-countersign-mode": arm}
        return Target(arm, f"{base}/v1/chat/completions", orjson.dumps(request), headers)

    def _cpu(self) -> tuple[float, float]:
        return cpu_seconds(self._stack.pid("proxy")), cpu_seconds(self._stack.pid("worker"))

    def _settle(self) -> tuple[float, int]:
        """Wait until every generation has its verdict, so that no burst pays for another one's verification.

        Returns the seconds that took, and how many are still without.

        Blocks on purpose: nothing else is under way then.
        """
        start = time.monotonic()
        while (left := self._stack.undecided()) and time.monotonic() < start + SETTLE_SECONDS:
            time.sleep(0.002)
        return time.monotonic() - start, left

    def _row(self, number: int, arm: str, load: Load, timed: Timed, verdict: str) -> Row:
        gaps = np.zeros(1)
        ttft = total = float("nan")
        chunks, error = 0, timed.error
        if timed.response is not None:
            response = timed.response
            error = next(self._complaints(arm, load, response, verdict), "")
            chunks = len(response.token_times)
            total = response.finished - timed.due
            if chunks:
                ttft = float(response.token_times[0]) - timed.due
                gaps = np.diff(response.token_times) if chunks > 1 else gaps
        p50, p99 = np.quantile(gaps, [0.5, 0.99]) * 1000
        return Row(
            round=number,
            burst=self._bursts,
            concurrency=load.concurrency,
            asked_tokens=load.tokens,
            arm=arm,
            chunks=chunks,
            ttft_ms=ttft * 1000,
            total_ms=total * 1000,
            gap_p50_ms=float(p50),
            gap_p99_ms=float(p99),
            gap_max_ms=float(gaps.max()) * 1000,
            verdict=verdict,
            error=error,
        )

    def _complaints(self, arm: str, load: Load, response: Response, verdict: str) -> Iterator[str]:
        if not len(response.token_times):
            yield "no tokens"
        if self._expect.text is not None and response.text != self._expect.text(load.tokens):
            yield "text differs"
        if arm == "direct":
            return
        if not verdict:
            yield "no verdict"
        # An answer that nobody checked is cheaper than what is being measured.
        if verdict.startswith("unverified"):
            yield verdict
        if arm == "inline" and response.verdict != verdict:
            yield f"{response.verdict or 'no verdict'} in the stream"


def as_dicts(rows: Sequence[Row] | Sequence[Cost]) -> list[dict[str, object]]:
    """Rows for a CSV file, numbers rounded to a nanosecond."""
    return [
        {key: round(value, 6) if isinstance(value, float) else value for key, value in asdict(row).items()}
        for row in rows
    ]
