"""Many requests in the engine at once: tokens per second of generation, of every way to replay, and of the floor."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.cost.arms import Request, Timed
from benchmarks.cost.claims import Claims, load_name, made_up
from benchmarks.cost.grid import Engine, prompt_ids
from benchmarks.cost.plan import FLAT, PLAIN, WORKER, Load
from benchmarks.cost.rows import Rows
from benchmarks.harness.progress import Bar, Clock
from benchmarks.harness.rows import Row, told
from policies.evidence import Evidence, Replay

TEMPERATURE = 0.7
"""Of the answers at load: with a seed each, as the proxy asks, so that `selection` has its whole work to do."""
WARM_UP = 8
"""Requests of a load that every arm runs first, untimed."""


class Loads:
    """Runs loads on an engine; keeps the workers' answers and the last replays of form `full`.

    Args:
        worker: whether a worker answers; otherwise replays are of made-up answers.
    """

    def __init__(
        self, engine: Engine, rows: Rows, claims: Claims, clock: Clock, bar: Bar, *, top_k: int, seed: int, worker: bool
    ) -> None:
        self._engine, self._rows, self._claims = engine, rows, claims
        self._clock, self._bar = clock, bar
        self._top_k, self._seed, self._worker = top_k, seed, worker
        self.replays: list[tuple[Evidence, Replay]] = []

    def run(self, loads: Sequence[Load], arms: Sequence[str], repeats: int) -> bool:
        """Every arm of every load in random order, the worker's first run before all others; True when all was done."""
        known = {(row["load"], row["arm"], row["iter"]) for row in self._rows if not row["error"]}
        complete = True
        todo = [
            (load, arm)
            for load in loads
            for arm, number in load_turns(arms, repeats)
            if (load.name, arm, number) not in known
        ]
        of = len(todo)
        for load in loads:
            turns = load_turns(arms, repeats)
            random.Random(self._seed).shuffle(turns)
            turns.sort(key=lambda turn: turn != (WORKER, 0))
            requests = self.requests(load)
            warm: set[str] = set()
            for arm, number in turns:
                if (load.name, arm, number) in known:
                    continue
                self._bar.show(f"{load.name} {arm}", of - len(todo), of, self._clock.left(_work(todo)))
                todo.remove((load, arm))
                if not self._clock.fits(f"load-{arm}", _units(arm, load)):
                    complete = False
                    continue
                if arm not in warm:
                    self._try(arm, [_short(arm, request) for request in requests[:WARM_UP]])
                    warm.add(arm)
                self._timed(load, arm, number, requests)
        return complete

    def requests(self, load: Load) -> list[Request]:
        """The requests of a load, the same in every run."""
        vocab = self._engine.vocab_size
        return [
            Request(
                load_name(load.name, place),
                prompt_ids(prompt, vocab, self._seed, place, prompt),
                output,
                TEMPERATURE,
                self._seed * 1_000_003 + place,
                at_least=False,
            )
            for place, (prompt, output) in enumerate(load.requests)
        ]

    def _timed(self, load: Load, arm: str, number: int, requests: Sequence[Request]) -> None:
        timed, error = self._try(arm, requests)
        row: Row = {
            "load": load.name,
            "arm": arm,
            "iter": number,
            "requests": len(load.requests),
            "tokens": load.tokens,
            "output_tokens": load.output_tokens,
            "seconds": None if timed is None else timed.seconds,
            "latency_p50_s": None if timed is None else float(np.median(timed.each)),
            "latency_max_s": None if timed is None else max(timed.each),
            "error": error,
        }
        self._rows.append(row)
        if timed is None:
            return
        self._clock.learn(f"load-{arm}", _units(arm, load), timed.seconds)
        if arm == WORKER:
            for request, result in zip(requests, timed.results, strict=True):
                self._claims.add(self._engine.evidence(request, result))
        elif arm == FLAT and number == 0 and self._worker:
            self.replays += [
                (self._claims[request.name], result) for request, result in zip(requests, timed.results, strict=True)
            ]

    def _try(self, arm: str, requests: Sequence[Request]) -> tuple[Timed | None, str]:
        try:
            ready = [self._ready(arm, request) for request in requests]
            return self._engine.run(arm, ready), ""
        except Exception as error:
            return None, told(error)

    def _ready(self, arm: str, request: Request) -> Request:
        if arm in (PLAIN, WORKER):
            return request
        answer: Any
        if self._worker:
            answer = self._claims[request.name]
        else:
            answer = made_up(request.prompt_ids, request.output_len, self._top_k, self._engine.vocab_size, request.name)
        return replace(request, answer=answer)


def load_turns(arms: Sequence[str], repeats: int) -> list[tuple[str, int]]:
    """(arm, number) of every run of a load. Generation takes longest and varies least, so it runs once."""
    return [(arm, number) for arm in arms for number in range(1 if arm in (PLAIN, WORKER) else repeats)]


def _short(arm: str, request: Request) -> Request:
    return replace(request, output_len=min(request.output_len, 16)) if arm in (PLAIN, WORKER) else request


def _work(todo: Sequence[tuple[Load, str]]) -> dict[str, float]:
    work: dict[str, float] = {}
    for load, arm in todo:
        work[f"load-{arm}"] = work.get(f"load-{arm}", 0.0) + _units(arm, load)
    return work


def _units(arm: str, load: Load) -> float:
    return float(load.output_tokens if arm in (PLAIN, WORKER) else load.tokens)
