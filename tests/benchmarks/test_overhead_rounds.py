"""Rounds against the scripted backend alone: what is run, and what counts as an error."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import cast

import numpy as np
import pytest

from benchmarks.overhead import rounds
from benchmarks.overhead.answer import Script
from benchmarks.overhead.rounds import Bench, Expectation, Load
from benchmarks.overhead.stack import Backend, Stack
from benchmarks.overhead.upstream import Plan, precise_loop, serve
from benchmarks.overhead.wire import Response

TOKENS = 6
LOADS = [Load(1, TOKENS, 3, 0.0), Load(4, 2, 2, 0.01)]


class BackendOnly:
    """A stack whose proxy is the scripted backend itself: it relays well and verifies nothing."""

    def __init__(self, url: str, undecided: int = 0) -> None:
        self.backend = Backend(url, "scripted", True)
        self.proxy_url = url
        self._undecided = undecided

    def pid(self, name: str) -> int:
        return os.getpid()

    def undecided(self) -> int:
        return self._undecided

    def verdicts(self, ids: list[str]) -> dict[str, str]:
        assert ids == []
        return {}

    def check(self) -> None:
        pass


def measure(*, text: Expectation | None = None, undecided: int = 0, seed: int = 1) -> Bench:
    async def run() -> Bench:
        server = await serve(Plan(Script(TOKENS), 0.005, 0.001))
        stack = BackendOnly(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", undecided)
        expect = text or Expectation(Script(TOKENS).text)
        bench = Bench(cast(Stack, stack), ["direct", "inline"], seed=seed, expect=expect)
        await bench.warm_up(LOADS)
        assert not bench.rows
        await bench.round(1, LOADS)
        await bench.round(2, LOADS)
        server.close()
        await asyncio.sleep(0.01)
        return bench

    with asyncio.Runner(loop_factory=precise_loop) as runner:
        return runner.run(run())


def test_every_arm_gets_every_burst_in_an_order_of_its_own() -> None:
    bench = measure()
    bursts = Counter((cost.round, cost.arm, cost.concurrency, cost.requests) for cost in bench.costs)
    expected = {(1, 1): 3, (4, 4): 2}
    for number in (1, 2):
        for arm in ("direct", "inline"):
            for (concurrency, requests), count in expected.items():
                assert bursts[number, arm, concurrency, requests] == count
    assert len(bench.rows) == 2 * 2 * (3 * 1 + 2 * 4)
    orders = [[cost.arm for cost in bench.costs if cost.round == number] for number in (1, 2)]
    assert orders[0] != orders[1]
    assert [cost.arm for cost in measure().costs] == [*orders[0], *orders[1]]
    assert all(cost.proxy_cpu_ms > 0 and cost.proxy_peak_mib > 1 for cost in bench.costs)


def test_rows_hold_the_times_and_what_was_missing() -> None:
    bench = measure()
    for row in bench.rows:
        assert row.chunks == row.asked_tokens
        assert row.total_ms >= row.ttft_ms >= 4.9
        assert row.gap_max_ms >= row.gap_p99_ms >= row.gap_p50_ms >= 0
        assert row.error == ("" if row.arm == "direct" else "no verdict")


def test_another_text_is_an_error() -> None:
    bench = measure(text=Expectation(lambda tokens: "something else"))
    assert {row.error for row in bench.rows} == {"text differs"}


def test_verdicts_that_never_come_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "SETTLE_SECONDS", 0.01)
    bench = measure(undecided=3)
    assert {(cost.arm, cost.undecided) for cost in bench.costs} == {("direct", 0), ("inline", 3)}
    assert min(cost.settle_ms for cost in bench.costs if cost.arm == "inline") >= 10


@pytest.mark.parametrize(
    ("arm", "in_stream", "stored", "error"),
    [
        ("async", None, "unaudited", ""),
        ("async", None, "", "no verdict"),
        ("async", None, "unverified: backlog", "unverified: backlog"),
        ("inline", "unaudited", "unaudited", ""),
        ("inline", "pending", "unaudited", "pending in the stream"),
        ("inline", None, "pass", "no verdict in the stream"),
        ("inline", "unverified", "unverified: store_unavailable", "unverified: store_unavailable"),
        ("direct", None, "", ""),
    ],
)
def test_an_arm_that_was_not_verified_is_an_error(arm: str, in_stream: str | None, stored: str, error: str) -> None:
    bench = Bench(cast(Stack, BackendOnly("")), ["direct", arm], seed=1, expect=Expectation(None))
    response = Response(200, {}, "text", np.ones(1), 1.0, in_stream)
    assert next(bench._complaints(arm, LOADS[0], response, stored), "") == error
