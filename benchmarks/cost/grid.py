"""One answer at a time, over a grid of input and output lengths."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from benchmarks.cost.arms import Request, Timed
from benchmarks.cost.claims import Claims, grid_name, made_up
from benchmarks.cost.plan import WORKER, Task, warm_ups
from benchmarks.cost.rows import Rows, grid_row
from benchmarks.harness.progress import Bar, Clock
from benchmarks.harness.rows import told
from policies.evidence import Evidence, Ids

WAKE_TOKENS = 16
"""Output tokens of the worker's run on a fresh engine."""


class Engine(Protocol):
    """What the grid and the loads need of `benchmarks.cost.arms.Arms`."""

    name: str

    @property
    def vocab_size(self) -> int:
        """Token ids below it exist."""

    def run(self, arm: str, requests: Sequence[Request]) -> Timed:
        """All requests at once."""

    def evidence(self, request: Request, result: object) -> Evidence:
        """What the proxy would keep of a `worker` result."""


def prompt_ids(length: int, vocab_size: int, *seed: int) -> Ids:
    """int32 (length,): random ordinary ids, the same for the same seed."""
    lowest = min(100, vocab_size // 10)
    return np.random.default_rng(seed).integers(lowest, int(vocab_size * 0.9), length, dtype=np.int32)


def run_grid(
    engine: Engine,
    tasks: Sequence[Task],
    rows: Rows,
    claims: Claims,
    clock: Clock,
    bar: Bar,
    *,
    warmup: int,
    seed: int,
    top_k: int,
    worker: bool = True,
) -> bool:
    """Run the tasks in their order, a row each; what fails is a row with its error, and the rest goes on.

    Args:
        worker: whether a worker answers; otherwise replays are of made-up answers.

    Returns:
        Whether all was done: false when the clock left some out.
    """
    _wake(engine, tasks, seed, top_k)
    warm: set[tuple[int, int, str]] = set()
    unanswered: set[tuple[int, int]] = set()
    skipped = 0
    for number, task in enumerate(tasks):
        left = clock.left(_work(tasks[number:]))
        bar.show(f"{task.input_len}/{task.output_len} {task.arm}", number, len(tasks), left)
        kind, units = _kind(task), _units(task)
        extra = 0 if (*task.cell, task.arm) in warm else warm_ups(task.output_len, warmup)
        name = grid_name(task.cell)
        if not clock.fits(kind, units * (1 + extra)):
            skipped += 1
            continue
        if worker and task.arm != WORKER and name not in claims:
            if task.cell in unanswered:
                rows.append(grid_row(task, None, error="the worker gave no answer to replay"))
            else:
                skipped += 1  # its worker's turn did not come
            continue
        request = _request(task, engine.vocab_size, seed)
        try:
            answer = _answer(task, request, claims, worker, top_k, engine.vocab_size)
            ready = Request(name, request.prompt_ids, task.output_len, answer=answer)
            for _ in range(extra):
                clock.learn(kind, units, engine.run(task.arm, [ready]).seconds)
            timed = engine.run(task.arm, [ready])
            tokens = _check(task, ready, timed, engine, claims)
        except Exception as error:
            if task.arm == WORKER:
                unanswered.add(task.cell)
            rows.append(grid_row(task, None, error=told(error)))
            continue
        warm.add((*task.cell, task.arm))
        clock.learn(kind, units, timed.seconds)
        rows.append(grid_row(task, timed.seconds, gen_tokens=tokens, warmup=extra))
    bar.show("grid", len(tasks) - skipped, len(tasks), None, last=True)
    return not skipped


def _wake(engine: Engine, tasks: Sequence[Task], seed: int, top_k: int) -> None:
    """One untimed run of every arm at the greatest lengths: a fresh engine still compiles kernels and grows buffers,
    which belongs to no cell, and cells of long answers have no warm-up."""
    if not tasks:
        return
    prompt, output = max(task.input_len for task in tasks), max(task.output_len for task in tasks)
    ids = prompt_ids(prompt, engine.vocab_size, seed)
    answer = made_up(ids, output, top_k, engine.vocab_size, "wake")
    for arm in dict.fromkeys(task.arm for task in tasks):
        with contextlib.suppress(Exception):  # what is wrong with an arm its own rows will say
            length = min(output, WAKE_TOKENS) if arm == WORKER else output
            engine.run(arm, [Request("wake", ids, length, answer=answer)])


def _answer(task: Task, request: Request, claims: Claims, worker: bool, top_k: int, vocab_size: int) -> Evidence | None:
    if task.arm == WORKER:
        return None
    if worker:
        return claims[request.name]
    return made_up(request.prompt_ids, task.output_len, top_k, vocab_size, request.name)


def _check(task: Task, request: Request, timed: Timed, engine: Engine, claims: Claims) -> int:
    """Tokens that were generated; keeps a cell's first answer. Raises ValueError when the answer is too short."""
    if task.arm != WORKER:
        return 1
    evidence = engine.evidence(request, timed.results[0])
    if len(evidence.output_ids) != task.output_len:
        raise ValueError(f"{len(evidence.output_ids)} tokens came instead of {task.output_len}")
    claims.add(evidence)
    return len(evidence.output_ids)


def _request(task: Task, vocab_size: int, seed: int) -> Request:
    ids = prompt_ids(task.input_len, vocab_size, seed, *task.cell)
    return Request(grid_name(task.cell), ids, task.output_len)


def _kind(task: Task) -> str:
    return task.arm


def _units(task: Task) -> float:
    """What the time of a run grows with: decoded tokens, or prefilled ones and a start-up cost of some hundred."""
    return float(task.output_len + task.input_len / 64 if task.arm == WORKER else task.total_tokens + 256)


def _work(tasks: Sequence[Task]) -> dict[str, float]:
    work: dict[str, float] = {}
    for task in tasks:
        work[_kind(task)] = work.get(_kind(task), 0.0) + _units(task)
    return work
