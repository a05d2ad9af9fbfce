"""What is measured, in which order: cells of input and output lengths, arms and repeats."""

from __future__ import annotations

import argparse
import random
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

WORKER = "worker"
PLAIN = "plain"
DICTS = "dicts"
FLAT = "flat"
IDS = "ids"
PREFILL = "prefill"

VERIFIERS = (DICTS, FLAT, IDS, PREFILL)
ARMS = (WORKER, *VERIFIERS)
"""One answer at a time: generation with logprobs, then what one replay of it costs; `prefill` is the floor."""
LOAD_ARMS = (PLAIN, WORKER, *VERIFIERS)
"""Many at once: also generation without logprobs."""

LONG = 2048
"""Output tokens from which on a cell is measured once, without warm-up."""


@dataclass(frozen=True, slots=True)
class Task:
    """One timed run of one arm on one cell; `iter` counts a cell's runs of an arm from 0."""

    input_len: int
    output_len: int
    arm: str
    iter: int

    @property
    def cell(self) -> tuple[int, int]:
        """Input and output tokens."""
        return self.input_len, self.output_len

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.input_len + self.output_len


def plan(
    inputs: Sequence[int],
    outputs: Sequence[int],
    arms: Sequence[str],
    *,
    repeats: int,
    seed: int,
    max_total_tokens: int = 0,
    worker_repeats: int | None = None,
) -> list[Task]:
    """Every run of every cell in a random order that interleaves cells and arms.

    A cell's first run is its worker's, whose claim the other arms replay. Cells over `max_total_tokens` (0: no limit)
    are left out; outputs from `LONG` on run once. `worker_repeats` is the worker's own number of runs.
    """
    tasks = [
        Task(prompt, output, arm, number)
        for prompt in dict.fromkeys(inputs)
        for output in dict.fromkeys(outputs)
        if not max_total_tokens or prompt + output <= max_total_tokens
        for arm in arms
        for number in range(runs(output, worker_repeats or repeats if arm == WORKER else repeats))
    ]
    random.Random(seed).shuffle(tasks)
    places: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, task in enumerate(tasks):
        places[task.cell].append(place)
    for own in places.values():
        first = next((place for place in own if tasks[place].arm == WORKER), None)
        if first is not None:
            tasks[own[0]], tasks[first] = tasks[first], tasks[own[0]]
    return tasks


def runs(output_len: int, repeats: int) -> int:
    """How often a cell with so many output tokens is timed."""
    return 1 if output_len >= LONG else repeats


def warm_ups(output_len: int, warmup: int) -> int:
    """How many untimed runs precede a cell's first timed one of an arm."""
    return 0 if output_len >= LONG else warmup


def planned(options: argparse.Namespace, arms: Sequence[str]) -> list[Task]:
    """The grid that a command line asks for."""
    return plan(
        options.input_lengths,
        options.output_lengths,
        arms,
        repeats=options.repeats,
        seed=options.seed,
        max_total_tokens=options.max_total_tokens,
        worker_repeats=options.worker_repeats,
    )


def left(tasks: Iterable[Task], done: Collection[Task]) -> list[Task]:
    """Tasks without a good row, in their order."""
    return [task for task in tasks if task not in done]


def lengths(text: str) -> list[int]:
    """`"128 512"` or `"128,512"` as numbers. Raises ValueError for anything but positive integers."""
    parts = [part for part in re.split(r"[\s,]+", text) if part]
    if not parts or not all(re.fullmatch(r"\+?0*[1-9][0-9]{0,8}", part) for part in parts):
        raise ValueError(f"lengths above 0, such as '128 512', not {text!r}")
    return [int(part) for part in parts]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are in the engine at once: (input tokens, output tokens) of each; `name` is how it was written."""

    name: str
    requests: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and answers."""
        return sum(prompt + output for prompt, output in self.requests)

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(output for _, output in self.requests)


SHORT_ANSWERS = "96x256/16+96x512/32+32x1024/1+32x128/64"
"""Classification, extraction, short chat."""
STANDARD_LOADS = f"64x128/1024 128x512/256 {SHORT_ANSWERS}"


def loads(text: str) -> list[Load]:
    """`COUNTxINPUT/OUTPUT` terms joined by `+`, loads separated by spaces. Raises ValueError."""
    found = []
    for name in text.split():
        requests: list[tuple[int, int]] = []
        for term in name.split("+"):
            parts = re.fullmatch(r"(\d+)x(\d+)/(\d+)", term)
            if parts is None or not all(map(int, parts.groups())):
                raise ValueError(f"COUNTxINPUT/OUTPUT, such as 64x128/1024, not {term!r}")
            count, prompt, output = map(int, parts.groups())
            requests += [(prompt, output)] * count
        found.append(Load(name, tuple(requests)))
    return found
