"""Which answers a calibration asks for. Deterministic: a run that was broken off continues where it stopped.

An arm is one way of asking: one backend, so many requests in flight, one temperature, one truncation. The profile's
label of an arm leaves the temperature out, which the profile keeps apart by itself. Lengths, kinds of prompt and
streaming take turns within an arm, as in traffic. `apart` makes each kind of prompt a condition of its own: the most
lenient kind then speaks, at the price of so many times fewer answers per cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from benchmarks.calibration.prompts import KINDS, LONG_WORDS
from policies.profile import FEWEST_RESPONSES


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of asking. `top_p` 1 and `top_k` 0 are off."""

    backend: str
    concurrency: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    @property
    def label(self) -> str:
        """The condition's name in the profile."""
        truncation = [f"top_p {self.top_p:g}"] * (self.top_p < 1) + [f"top_k {self.top_k}"] * (self.top_k > 0)
        return ", ".join([self.backend, f"batch {self.concurrency}", *truncation])

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.label}, T={self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Shot:
    """One request."""

    index: int
    arm: Arm
    kind: str
    number: int
    max_tokens: int
    stream: bool
    apart: bool = False

    @property
    def label(self) -> str:
        """The condition's name in the profile."""
        return f"{self.arm.label}, {self.kind}" if self.apart else self.arm.label


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask. `requests` is per backend.

    Attributes:
        requests: answers per backend, shared out evenly among its arms.
        lengths: tokens asked for, in turn; an answer may end sooner by itself.
        top_p, top_k: values besides "off", each an arm of its own at every temperature above 0.
        words: about the length of the long kinds of prompt.
        apart: each kind of prompt is a condition of its own.
    """

    backends: tuple[str, ...]
    requests: int
    concurrency: tuple[int, ...] = (1, 8)
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    lengths: tuple[int, ...] = (32, 64, 128)
    kinds: tuple[str, ...] = KINDS
    top_p: tuple[float, ...] = ()
    top_k: tuple[int, ...] = ()
    words: int = LONG_WORDS
    apart: bool = False

    def arms(self, backend: str) -> list[Arm]:
        """Every way of asking one backend, one at a time first."""
        truncations = [(1.0, 0), *((top_p, 0) for top_p in self.top_p), *((1.0, top_k) for top_k in self.top_k)]
        return [
            Arm(backend, concurrency, temperature, *truncation)
            for concurrency, temperature, truncation in product(self.concurrency, self.temperatures, truncations)
            if temperature > 0 or truncation == (1.0, 0)
        ]

    @property
    def fewest(self) -> int:
        """Requests per backend that the arms need at least."""
        return len(self.arms("")) * FEWEST_RESPONSES * (len(self.kinds) if self.apart else 1)

    def shots(self) -> list[Shot]:
        """Every request in its order; those of one arm stand together."""
        shots: list[Shot] = []
        for backend in self.backends:
            arms = self.arms(backend)
            turns = _turns(self.kinds, self.lengths)
            for place, arm in enumerate(arms):
                share = self.requests // len(arms) + (place < self.requests % len(arms))
                for _ in range(share):
                    kind, number, max_tokens, stream = next(turns)
                    shots.append(Shot(len(shots), arm, kind, number, max_tokens, stream, self.apart))
        return shots

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Plan:
        """Reads `as_json` back. Raises TypeError."""
        fields: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in tree.items()}
        return cls(**fields)

    def as_json(self) -> dict[str, Any]:
        """For the manifest of a kept run; equal plans give equal trees."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def _turns(kinds: Sequence[str], lengths: Sequence[int]) -> Iterator[tuple[str, int, int, bool]]:
    """Kinds in turn; each kind meets every length, streamed and not, in its own turn."""
    number = 0
    while True:
        for place, kind in enumerate(kinds):
            streamed, length = divmod(number + place, len(lengths))
            yield kind, number, lengths[length], bool(streamed % 2)
        number += 1
