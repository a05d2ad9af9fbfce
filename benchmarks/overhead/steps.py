"""The order of a run: rounds, in each the audit rates, at each every arm and cell, all at random but for the seed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.harness.plan import shuffled
from benchmarks.harness.rows import Row, told
from benchmarks.overhead.cells import Cell

DIRECT, PLAIN, ASYNC, INLINE = "direct", "plain", "async", "inline"
ARMS = (DIRECT, PLAIN, ASYNC, INLINE)
"""Straight to the backend; through the proxy without evidence or verification; verified after the answer; and before
its end."""
VERIFIED = (ASYNC, INLINE)

STEP, BYTES = "step", "bytes"
"""Kinds of rows."""
QUIET_SECONDS = 0.03
"""At a step's end, after its last verdict."""

Key = tuple[int, float, str, str, int]


@dataclass(frozen=True, slots=True)
class Step:
    """One cell asked of one arm. `audit` is the share of answers that are replayed meanwhile."""

    round: int
    audit: float
    arm: str
    cell: Cell
    repeat: int = 0

    @property
    def key(self) -> Key:
        """Tells it from every other one."""
        return self.round, self.audit, self.arm, self.cell.name, self.repeat

    @property
    def columns(self) -> Row:
        """What its row says of it."""
        return {
            "what": STEP,
            "round": self.round,
            "audit": self.audit,
            "arm": self.arm,
            "cell": self.cell.name,
            "kind": self.cell.kind,
            "at": self.cell.at,
            "mix": self.cell.mix.name,
            "repeat": self.repeat,
        }

    def broken(self, error: Exception) -> Row:
        """Its row where it came to nothing."""
        return self.columns | {"requests": 0, "error": told(error)}

    def __str__(self) -> str:
        return f"round {self.round}, audit {self.audit:.0%}: {self.arm}, {self.cell.name}"


def steps(cells: Sequence[Cell], arms: Sequence[str], audits: Sequence[float], *, rounds: int, seed: int) -> list[Step]:
    """Every step of a run, in its order.

    `direct` and `plain` know no audits, yet are measured beside each rate: what an arm adds is the difference to a
    `direct` of the same minutes.
    """
    found: list[Step] = []
    for number in range(1, rounds + 1):
        for audit in shuffled(dict.fromkeys(audits), seed, number):
            block = [
                Step(number, audit, arm, cell, repeat)
                for cell in cells
                for arm in arms
                for repeat in range(cell.repeats)
            ]
            found += shuffled(block, seed, number, audit)
    return found


def done(rows: Iterable[Row]) -> set[Key]:
    """Steps that have their row."""
    return {
        (row["round"], row["audit"], row["arm"], row["cell"], row["repeat"])
        for row in rows
        if row["what"] == STEP and not row["error"]
    }


def left(planned: Sequence[Step], known: Collection[Key]) -> list[Step]:
    """Steps without a row."""
    return [step for step in planned if step.key not in known]


def seconds(planned: Iterable[Step], rows: Sequence[Row], first: float, gap: float, pause: float) -> float:
    """About how long these steps take: as long as steps like them took, or by a backend's pace where there are none.

    Args:
        first, gap: seconds to a first token, and between others.
        pause: seconds besides, for verdicts and between steps.
    """
    known: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["what"] == STEP and not row["error"]:
            known.setdefault((row["arm"], row["cell"]), []).append(float(row["seconds"]))
    total = 0.0
    for step in planned:
        like = known.get((step.arm, step.cell.name))
        total += sum(like) / len(like) if like else step.cell.seconds(first, gap) + pause
    return total
