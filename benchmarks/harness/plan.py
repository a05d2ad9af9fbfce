"""What a benchmark is about to do, for `--dry-run`."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.harness.markdown import table

SHOWN = 24
"""Entries of the order that are printed."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """A run before it is one.

    Attributes:
        title: the benchmark and where its rows go.
        facts: what else matters, one line each.
        arms: what is compared.
        cells: head and lines of the table of what each arm is given.
        order: every step, in the order in which it is run.
        done: how many of them have their rows already.
        seconds: about how long the others take; None where nobody can tell.
        basis: what that is reckoned from.
    """

    title: str
    arms: Sequence[str]
    cells: Sequence[Sequence[str]]
    order: Sequence[str]
    done: int = 0
    seconds: float | None = None
    basis: str = ""
    facts: Sequence[str] = field(default_factory=tuple)

    def text(self) -> str:
        """For a terminal."""
        head, *lines = self.cells
        shown = [f"{number:>4}. {step}" for number, step in enumerate(self.order[:SHOWN], 1)]
        more = [f"      … and {len(self.order) - SHOWN} more"] if len(self.order) > SHOWN else []
        estimate = "unknown" if self.seconds is None else duration(self.seconds)
        parts = [
            f"# {self.title}",
            "\n".join([*self.facts, f"Arms: {', '.join(self.arms)}."]),
            table(head, lines),
            f"{len(self.order)} steps, of which {self.done} are measured already. Time: {estimate}"
            + (f" ({self.basis})." if self.basis else "."),
            "\n".join([*shown, *more]),
        ]
        return "\n\n".join(part for part in parts if part)


def duration(seconds: float) -> str:
    """Words for a length of time."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.1f} min ({round(seconds)} s)"


def shuffled(items: Iterable[T], *seed: object) -> list[T]:
    """These in an order that only `seed` decides."""
    found = list(items)
    random.Random("/".join(map(str, seed))).shuffle(found)
    return found
