"""What each arm is asked for: how many requests, how they arrive, how long prompts and answers are."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["closed", "poisson", "burst"]

_PART = re.compile(r"(?:(\d{1,4})\*)?(\d{1,6})/(\d{1,6})")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt and of its answer. Prompts of chats are about that long: a token per word."""

    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Mix:
    """Lengths and their weights, as `3*64/32+512/16` says them."""

    name: str
    parts: tuple[tuple[int, Lengths], ...]

    def drawn(self, random: np.random.Generator, count: int) -> list[Lengths]:
        """So many of them, in a random order, each as often as its weight says, as nearly as `count` allows."""
        weights = np.array([weight for weight, _ in self.parts], float)
        shares = np.floor(count * np.cumsum(weights) / weights.sum() + 0.5).astype(int)
        counts = np.diff(np.concatenate([[0], shares]))
        found = [lengths for (_, lengths), many in zip(self.parts, counts, strict=True) for _ in range(many)]
        return [found[place] for place in random.permutation(len(found))]

    @property
    def longest(self) -> Lengths:
        """Longest prompt and longest answer."""
        lengths = [each for _, each in self.parts]
        return Lengths(max(each.prompt for each in lengths), max(each.answer for each in lengths))

    @property
    def mean_answer(self) -> float:
        """Tokens of an answer, on average."""
        weights, answers = zip(*((weight, each.answer) for weight, each in self.parts), strict=True)
        return float(np.average(answers, weights=weights))


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of load.

    Attributes:
        kind: `closed`: each of `at` clients asks again as soon as it was answered; `poisson`: `at` requests a second,
            whether or not earlier ones were answered; `burst`: `at` requests within a quarter of an answer's length.
        requests: of one step. repeats: steps per arm and round.
        spread: seconds over which a burst is spread.
    """

    kind: Kind
    at: float
    mix: Mix
    requests: int
    repeats: int = 1
    spread: float = 0.0

    @property
    def name(self) -> str:
        """In rows: `closed 16 128/128`."""
        return f"{self.kind} {self.at:g} {self.mix.name}"

    @property
    def title(self) -> str:
        """In a report."""
        return title(self.kind, self.at, self.mix.name)

    def offsets(self, random: np.random.Generator) -> NDArray[np.float64]:
        """When each request is due, seconds from the start; closed loops know no such times."""
        if self.kind == "poisson":
            found: NDArray[np.float64] = np.cumsum(random.exponential(1 / self.at, self.requests))
            return found
        return np.sort(random.uniform(0.0, self.spread, self.requests))

    def seconds(self, first: float, gap: float) -> float:
        """About how long a step takes where a first token comes after `first` and others every `gap` seconds."""
        answer = first + gap * self.mix.mean_answer
        if self.kind == "closed":
            return self.requests / self.at * answer
        return answer + (self.requests / self.at if self.kind == "poisson" else self.spread)


def title(kind: str, at: float, mix: str) -> str:
    """A cell in words."""
    if kind == "poisson":
        words = f"{at:g} requests a second, Poisson arrivals"
    elif at == 1:
        words = "One request at a time"
    else:
        words = f"{at:g} clients, closed loop" if kind == "closed" else f"{at:g} streams at once"
    return f"{words}; prompt/answer tokens {mix}"


def mixes(text: str) -> Mix:
    """`3*64/32+512/16` as a mix. Raises ArgumentTypeError."""
    parts = []
    for term in text.split("+"):
        found = _PART.fullmatch(term.strip())
        if found is None or not int(found[2]) or not int(found[3]) or found[1] == "0":
            raise ArgumentTypeError(f"expected PROMPT/ANSWER tokens, such as 64/32 or 3*64/32+512/16, not {text!r}")
        parts.append((int(found[1] or 1), Lengths(int(found[2]), int(found[3]))))
    return Mix(text.replace(" ", ""), tuple(parts))


def cells(
    given: Sequence[Mix],
    *,
    closed: Sequence[int],
    rates: Sequence[float],
    bursts: Sequence[int],
    requests: int,
    arrivals: int,
    repeats: int,
    first: float,
    gap: float,
) -> Iterator[Cell]:
    """Every kind of load with every mix.

    Args:
        requests: of each client of a closed loop, per step.
        arrivals: of a step of Poisson arrivals.
        repeats: bursts per step of a round.
        first, gap: seconds that a first token and each other one take, which spread a burst.
    """
    for mix in given:
        for streams in dict.fromkeys(closed):
            yield Cell("closed", streams, mix, streams * requests)
        for rate in dict.fromkeys(rates):
            yield Cell("poisson", rate, mix, arrivals)
        for streams in dict.fromkeys(bursts):
            # Not in step, yet all of them overlap.
            spread = (first + gap * mix.mean_answer) / 4 if streams > 1 else 0.0
            yield Cell("burst", streams, mix, streams, repeats if streams > 1 else repeats * 5, spread)
