"""What a cheat that knows the sampling noise can compute: who wins each position under a claim, and by how much."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.adversary.answers import Choice
from benchmarks.adversary.servers import Body, Row
from policies import noise

LOWEST_TEMPERATURE = 0.01
"""vLLM raises 0 < T < 0.01 to this."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How one choice is drawn. `seed` is the choice's own."""

    runtime: str
    temperature: float
    seed: int | None

    @property
    def known(self) -> bool:
        """Whether the draw can be recomputed."""
        return self.temperature == 0 or (self.seed is not None and self.runtime in noise.RUNTIMES)

    def gumbel(self, prompt_tokens: int, ids: NDArray[np.int32]) -> NDArray[np.float64]:
        """Noise of each candidate at each position, float64 (G, W), zero at temperature 0."""
        if self.temperature == 0 or self.seed is None:
            return np.zeros(ids.shape)
        drawn = noise.gumbel(self.runtime, self.seed, prompt_tokens, ids)
        return np.zeros(ids.shape) if drawn is None else drawn

    def scores(self, prompt_tokens: int, rows: list[Row], start: int = 0) -> list[Row]:
        """Every entry's logprob/T + noise (its logprob at T = 0), for rows that begin at output position `start`."""
        width = max(map(len, rows), default=0)
        ids = np.full((start + len(rows), width), -1, np.int32)
        for at, row in enumerate(rows):
            ids[start + at, : len(row)] = list(row)
        gumbel = self.gumbel(prompt_tokens, ids)[start:]
        scale = self.temperature or 1.0
        return [
            {id: value / scale + float(gumbel[at, column]) for column, (id, value) in enumerate(row.items())}
            for at, row in enumerate(rows)
        ]


def rules(choice: Choice, asked: Body, runtime: str) -> Rules:
    """How this choice of a request was to be drawn: vLLM gives choice i the request's seed plus i."""
    temperature = float(asked.get("temperature", 1.0))
    if 0 < temperature < LOWEST_TEMPERATURE:
        temperature = LOWEST_TEMPERATURE
    seed = asked.get("seed")
    own = None if seed in (None, -1) else int(seed) + choice.index % max(1, int(asked.get("n") or 1))
    return Rules(runtime, temperature, own)


def losses(own: list[int], scores: list[Row]) -> list[float]:
    """By how much each emitted token loses to the best of its row; 0 where it wins."""
    return [max(row.values()) - row[id] for id, row in zip(own, scores, strict=True)]


def winner(scores: Row) -> int:
    """The token that is drawn."""
    return max(scores, key=scores.__getitem__)


def bend(row: Row, own: int, scores: Row, temperature: float, slack: float = 5e-3) -> Row:
    """The claim changed as little as makes `own` win: it rises, all others sink alike, the listed mass stays.

    `slack` is by how much it wins afterwards, in the units of `scores`.
    """
    best = max((score for id, score in scores.items() if id != own), default=-math.inf)
    missing = best - scores[own] + slack
    if missing <= 0:
        return row
    scale = temperature or 1.0
    mass = sum(map(math.exp, row.values()))
    low, high = 0.0, min(missing * scale, -row[own])

    def sinks(rise: float) -> float:
        left = mass - math.exp(row[own] + rise)
        now = mass - math.exp(row[own])
        return math.inf if left <= 0 else math.log(now / left)

    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if (middle + sinks(middle)) / scale >= missing else (middle, high)
    if not math.isfinite(sinks(high)):
        high = low
    return {id: value + high if id == own else value - sinks(high) for id, value in row.items()}


def listed(row: Row, own: int, width: int) -> Row:
    """A row as vLLM lists it: the emitted token, then the `width` most probable without it, falling."""
    others = sorted((id for id in row if id != own), key=lambda id: -row[id])
    outside = sum(row[id] > row[own] for id in others) >= width
    return {id: row[id] for id in (own, *others[: width if outside else max(0, width - 1)])}
