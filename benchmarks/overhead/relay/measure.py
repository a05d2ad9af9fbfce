"""Bursts of every arm in random order inside each round, one line per burst."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import orjson

from benchmarks.harness.plan import shuffled
from benchmarks.harness.rows import told, unplaced
from benchmarks.harness.usage import cpu_seconds, family, resident_bytes
from benchmarks.overhead.answer import MODEL, paced
from benchmarks.overhead.client import Target, Timed, burst
from benchmarks.overhead.relay.loads import FIRST_SECONDS, Load
from benchmarks.overhead.relay.stack import KEY, RelayStack

PATIENCE_SECONDS = 60.0
_QUIET_SECONDS = 0.1
_SETTLED = 0.002
UNRECORDED = "unrecorded"
"""An error of answers that came whole, and whose evidence was not kept."""


Key = tuple[int, str, int, bool, int]


@dataclass(frozen=True, slots=True)
class Turn:
    """A burst that is to be."""

    round: int
    arm: str
    load: Load
    repeat: int = 0

    @property
    def key(self) -> Key:
        """As its burst's."""
        return self.round, self.arm, self.load.streams, self.load.warm, self.repeat

    def broken(self, error: Exception) -> Burst:
        """What is kept of it where it came to nothing."""
        streams = self.load.streams
        found = Burst(self.round, streams, self.arm, streams, warm=self.load.warm, repeat=self.repeat, broken=True)
        found.errors = {unplaced(told(error)): streams}
        return found

    def __str__(self) -> str:
        each = f"one request each {1000 * self.load.spacing:g} ms" if self.load.warm else f"{self.load.streams} streams"
        return f"round {self.round}: {self.arm}, {each}"


def turns(loads: Sequence[Load], arms: Sequence[str], rounds: Iterable[int], seed: int) -> list[Turn]:
    """Every burst of every round, shuffled inside rounds."""
    return [
        turn
        for number in rounds
        for turn in shuffled(
            [
                Turn(number, arm, load, repeat)
                for load in loads
                for arm in arms
                if load.has(arm, number)
                for repeat in range(load.repeats)
            ],
            seed,
            number,
        )
    ]


@dataclass(slots=True)
class Burst:
    """What one burst showed. Times in milliseconds, memory in MiB; CPU is that of the process between the two ends.

    Attributes:
        warm: each request came soon after the one before (`Load.spacing`).
        first_ms: from when each request was due to its first token.
        gaps_ms: p50, p99 and the longest of all times between two tokens of a stream.
        cpu_ms: from the first request until the process had nothing to do any more.
        window_cpu_ms, window_chunks: while every stream flowed and none began or ended.
        broken: nothing came of it; `errors` says why.
    """

    round: int
    streams: int
    arm: str
    requests: int
    chunks: int = 0
    first_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    cpu_ms: float = 0.0
    window_cpu_ms: float = 0.0
    window_chunks: int = 0
    resident_mib: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    warm: bool = False
    repeat: int = 0
    broken: bool = False

    @property
    def key(self) -> Key:
        """Tells it from every other one."""
        return self.round, self.arm, self.streams, self.warm, self.repeat

    def line(self) -> dict[str, Any]:
        """As it is written, numbers rounded to what they mean."""
        found = {name: _rounded(value) for name, value in asdict(self).items()}
        return found if self.broken else {name: value for name, value in found.items() if name != "broken"}


class Bench:
    """Runs warm-ups and bursts against a started stack. `seed` decides arrival times, alike for all arms of a round."""

    def __init__(self, stack: RelayStack, *, seed: int) -> None:
        self._stack = stack
        self._seed = seed

    async def warm_up(self) -> None:
        """Some streams through every arm that count nowhere. Raises CountersignError when a process ended."""
        for arm in self._stack.arms:
            for streams in (1, 32, 32):
                await self.burst(Turn(0, arm, Load(streams, 24, 0.01, 0.1)))

    async def burst(self, turn: Turn) -> Burst:
        """One burst. Raises CountersignError when a process ended."""
        self._stack.check()
        arm, load = turn.arm, turn.load
        offsets = load.offsets(np.random.default_rng([self._seed, turn.round, load.streams, turn.repeat]))
        marks: list[tuple[float, float, float]] = []
        loop = asyncio.get_running_loop()
        meter = _Meter(self._stack, arm)

        def mark() -> None:
            marks.append((loop.time(), meter.cpu(), meter.resident()))

        unrecorded = self._unrecorded(arm)
        before = meter.cpu()
        timed = await burst(
            self._target(arm, load),
            offsets,
            load.seconds + PATIENCE_SECONDS,
            [] if load.warm else [(at, mark) for at in load.window],
        )
        await meter.settle()
        found = Burst(turn.round, load.streams, arm, load.streams, warm=load.warm, repeat=turn.repeat)
        found.cpu_ms = 1000 * (meter.cpu() - before)
        _read(found, timed, load)
        if (more := int(self._unrecorded(arm) - unrecorded)) > 0:
            found.errors[UNRECORDED] = more
        if len(marks) == 2:
            (start, cpu, _), (end, after, resident) = marks
            found.window_cpu_ms, found.resident_mib = 1000 * (after - cpu), resident / 2**20
            found.window_chunks = chunks_between(timed, start, end)
        return found

    def _unrecorded(self, arm: str) -> float:
        return self._stack.unrecorded() if arm == "proxy" else 0.0

    def _target(self, arm: str, load: Load) -> Target:
        prompt = f"Write a long story about a lighthouse. {paced(FIRST_SECONDS, load.interval)}"
        request = {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": load.tokens,
            "temperature": 0,
            "stream": True,
        }
        headers = {"authorization": f"Bearer {KEY}"} if arm not in ("direct", "floor") else {}
        return Target(arm, f"{self._stack.urls[arm]}/v1/chat/completions", orjson.dumps(request), headers)


class _Meter:
    """CPU and memory of the gateway's processes; nothing for `direct`, which has none."""

    def __init__(self, stack: RelayStack, arm: str) -> None:
        self._pids = family(stack.pid(arm)) if arm != "direct" else []

    def cpu(self) -> float:
        """Seconds."""
        return sum(map(cpu_seconds, self._pids))

    def resident(self) -> float:
        """Bytes."""
        return sum(map(resident_bytes, self._pids))

    async def settle(self, patience: float = 20.0) -> None:
        """Until it does nothing any more, so that no burst pays for what another one left to do."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                before = -1.0
                while (now := self.cpu()) - before > _SETTLED:
                    before = now
                    await asyncio.sleep(_QUIET_SECONDS)


def chunks_between(timed: Sequence[Timed], start: float, end: float) -> int:
    """How many tokens arrived between two times on the loop's clock."""
    return sum(
        int(((one.response.token_times >= start) & (one.response.token_times < end)).sum())
        for one in timed
        if one.response is not None
    )


def _read(found: Burst, timed: Sequence[Timed], load: Load) -> None:
    """What the answers say; one that is not whole counts as an error and in nothing else."""
    errors: Counter[str] = Counter()
    gaps = []
    for one in timed:
        error = one.error
        if one.response is not None and len(one.response.token_times) != load.tokens:
            error = "tokens missing"
        if error or one.response is None:
            errors[error] += 1
            continue
        times = one.response.token_times
        found.chunks += len(times)
        found.first_ms.append(1000 * float(times[0] - one.due))
        gaps.append(np.diff(times))
    if gaps:
        all_gaps = 1000 * np.concatenate(gaps)
        found.gaps_ms = [*np.quantile(all_gaps, [0.5, 0.99]).tolist(), float(all_gaps.max())]
    found.errors = dict(errors)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    return [_rounded(each) for each in value] if isinstance(value, list) else value
