"""Runs the steps against a started stack: one row per step, with a column per request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.announced import Announced
from benchmarks.harness.rows import Row, rounded
from benchmarks.harness.usage import Gpu
from benchmarks.overhead.answer import Script
from benchmarks.overhead.asking import COUNTED, Asking
from benchmarks.overhead.cells import Cell, Lengths, Mix
from benchmarks.overhead.client import Timed, closed_loop, open_loop
from benchmarks.overhead.forwarding import Forwarder
from benchmarks.overhead.stack import Stack
from benchmarks.overhead.steps import BYTES, DIRECT, INLINE, PLAIN, QUIET_SECONDS, VERIFIED, Step
from benchmarks.overhead.wire import PENDING, Response

SETTLE_SECONDS = 60.0
WARM_UP = 3
"""Requests that every arm answers first, and that count nowhere."""
COUNTED_REQUESTS = 3
"""Requests per arm and mix whose bytes are counted."""


class Bench:
    """Takes steps.

    Args:
        script: what a scripted backend says.
        seed: of prompts, lengths and arrivals; arms of one round get the same lengths at the same times.
        timeout: seconds that a request may take.
    """

    def __init__(
        self,
        stack: Stack,
        asking: Asking,
        announced: Announced,
        gpu: Gpu,
        *,
        script: Script | None,
        seed: int,
        timeout: float,
    ) -> None:
        self._stack, self._asking, self._announced, self._gpu = stack, asking, announced, gpu
        self._script, self._seed, self._timeout = script, seed, timeout

    async def warm_up(self, arms: Sequence[str], mixes: Sequence[Mix]) -> None:
        """Some requests through every arm. Raises CountersignError when a process ended."""
        for arm in arms:
            for mix in mixes:
                await self._take(Step(0, 0.0, arm, Cell("closed", 1, mix, WARM_UP)))

    async def step(self, step: Step) -> Row:
        """One step. Raises CountersignError when a process ended."""
        began = time.monotonic()
        cpu, stored, replayed = self._stack.cpu(), self._stack.stored(), self._stack.replayed()
        lengths, timed, settle, undecided = await self._take(step)
        await asyncio.sleep(QUIET_SECONDS)
        ended = time.monotonic()
        after, kept, more = self._stack.cpu(), self._stack.stored(), self._stack.replayed()
        row: Row = {
            **step.columns,
            "requests": len(timed),
            **self._requests(step, lengths, timed),
            "seconds": ended - began,
            "settle_ms": 1000 * settle,
            "undecided": undecided,
            "cpu_ms": {role: 1000 * (after[role] - cpu[role]) for role in cpu},
            "store": {name: kept[name] - stored[name] for name in kept},
            "replay_busy_ms": 1000 * (more["busy_s"] - replayed["busy_s"]),
            "replayed_tokens": more["tokens"] - replayed["tokens"],
            "proxy_peak_mib": self._stack.peak_mib(),
            "gpu_percent": self._gpu.mean(began, ended),
            "error": "",
        }
        found: Row = rounded(row, 4)
        return found

    async def bytes(self, arm: str, mix: Mix) -> Row:
        """Bytes that go to and come from the backend for requests of this arm, one after the other."""
        random = np.random.default_rng([self._seed, 0])
        _, _, port = self._stack.urls[COUNTED].rpartition(":")
        async with Forwarder(self._stack.backend.url, int(port)) as forwarder:
            urls = {**self._stack.urls, DIRECT: forwarder.url}
            lengths = mix.drawn(random, COUNTED_REQUESTS * len(mix.parts))
            targets = self._asking.targets(arm, urls, lengths, random, counted=True)
            timed = await closed_loop(targets, 1, self._timeout)
            await self.settle(arm)
            errors = sorted({one.error for one in timed if one.error})
            return {
                "what": BYTES,
                "arm": arm,
                "mix": mix.name,
                "requests": len(timed),
                "tokens": sum(each.answer for each in lengths),
                "up": forwarder.up,
                "down": forwarder.down,
                "error": "; ".join(errors),
            }

    async def _take(self, step: Step) -> tuple[list[Lengths], list[Timed], float, int]:
        self._stack.check()
        self._announced.taken()
        cell = step.cell
        shared = np.random.default_rng([self._seed, step.round, round(1000 * step.audit), step.repeat])
        own = np.random.default_rng([self._seed, *step.arm.encode(), step.round, round(1000 * step.audit), step.repeat])
        lengths = cell.mix.drawn(shared, cell.requests)
        targets = self._asking.targets(step.arm, self._stack.urls, lengths, own)
        if cell.kind == "closed":
            timed = await closed_loop(targets, round(cell.at), self._timeout)
        else:
            timed = await open_loop(targets, cell.offsets(shared), self._timeout)
        settle, undecided = await self.settle(step.arm)
        return lengths, timed, settle, undecided

    async def settle(self, arm: str) -> tuple[float, int]:
        """Wait until every generation has its verdict, so that no step pays for another one's verification.

        Returns the seconds that took, and how many are still without.
        """
        if arm not in VERIFIED:
            return 0.0, 0
        return await asyncio.to_thread(_settled, self._stack)

    def _requests(self, step: Step, lengths: Sequence[Lengths], timed: Sequence[Timed]) -> dict[str, list[Any]]:
        announced = self._announced.taken()
        verdicts = self._stack.verdicts([one.id for one in timed if one.id]) if step.arm in VERIFIED else {}
        lines = [
            self._request(step, each, one, verdicts.get(one.id, ""), announced.get(one.id))
            for each, one in zip(lengths, timed, strict=True)
        ]
        return {name: [line[name] for line in lines] for name in lines[0]}

    def _request(
        self, step: Step, lengths: Lengths, one: Timed, verdict: str, announced: float | None
    ) -> dict[str, Any]:
        """One request. Times in milliseconds, None where there are none; `errors` is empty when all is well."""
        found: dict[str, Any] = dict.fromkeys(TIMES)
        response, error = one.response, one.error
        chunks = 0
        if response is not None:
            error = next(self._complaints(step, lengths, response, verdict), "")
            found["total_ms"] = 1000 * (response.finished - one.due)
            chunks = len(response.token_times)
            if chunks:
                found["ttft_ms"] = 1000 * (float(response.token_times[0]) - one.due)
            if chunks > 1:
                gaps = 1000 * np.diff(response.token_times)
                p50, p99 = np.quantile(gaps, [0.5, 0.99]).tolist()
                found |= {"gap_p50_ms": p50, "gap_p99_ms": p99, "gap_max_ms": float(gaps.max())}
                found["gap_mean_ms"] = float(gaps.mean())
            if announced is not None:
                found["verdict_ms"] = 1000 * (announced - response.finished)
        return found | {
            "asked": lengths.answer,
            "prompt": None if response is None else response.prompt,
            "chunks": chunks,
            "verdicts": verdict,
            "errors": error,
        }

    def _complaints(self, step: Step, lengths: Lengths, response: Response, verdict: str) -> Iterator[str]:
        if not len(response.token_times):
            yield "no tokens"
        if response.billed is not None and response.billed != lengths.answer:
            yield "another number of tokens"
        if self._script is not None and response.text != self._script.text(lengths.answer):
            yield "text differs"
        if step.arm in (DIRECT, PLAIN):
            return
        if not verdict:
            yield "no verdict"
        # An answer that nobody checked is cheaper than what is being measured.
        if verdict.startswith("unverified"):
            yield verdict
        if step.arm == INLINE and response.verdict != verdict:
            yield f"{response.verdict or PENDING} in the stream"


def _settled(stack: Stack) -> tuple[float, int]:
    start = time.monotonic()
    while (left := stack.undecided()) and time.monotonic() < start + SETTLE_SECONDS:
        time.sleep(0.005)
    return time.monotonic() - start, left


TIMES = ("ttft_ms", "total_ms", "gap_p50_ms", "gap_p99_ms", "gap_max_ms", "gap_mean_ms", "verdict_ms")
"""Columns of a request's times. `verdict_ms` counts from the answer's last byte at the client; an inline verdict comes
before that."""
