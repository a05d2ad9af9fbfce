"""Recorded answers as units of evidence: what each says when it is replayed, and when it is not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.adversary.score import CALIBRATED, tokens_of
from benchmarks.detection.judging import as_choice
from benchmarks.detection.rows import judged, read_rows
from benchmarks.detection.tables import by_arm
from policies import coverage
from policies.unit import EXACT, PROCESSES, outcomes

Outcomes = Mapping[str, tuple[float, float]]
"""By process, (x, mu0), as `policies.unit.Unit` has them."""

BLOCK = 12
"""Answers that are resampled together: four prompts at three temperatures each."""
HONEST_ON_CPU = ("honest", "honest-batch", "honest-long", "honest-chunked", "honest-kernel")
_CAUGHT = ("reject", "withheld")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        outcomes: what it says when it is replayed.
        tokens: its output tokens.
        caught: it is rejected, or its evidence withheld, when replayed; `caught_unseen`: also when it is not.
        replayed: a replay would decide. `undecided`, `blame`: as `policies.coverage` has them.
        similarity: gonka's 1 − d, where it was measured. `p`: conformal p-values of the replayed checks.
    """

    outcomes: Outcomes
    tokens: int = 64
    caught: bool = False
    caught_unseen: bool = False
    replayed: bool = True
    undecided: str = ""
    blame: str = ""
    similarity: float | None = None
    p: Mapping[str, float] = field(default_factory=dict)

    @property
    def unseen(self) -> Outcomes:
        """What it says without a replay."""
        return {name: found for name, found in self.outcomes.items() if name in EXACT}


def of_outcomes(found: Outcomes, tokens: int = 64) -> Answer:
    """An answer of which only the outcomes are known."""
    failed = any(x > 0 for x, _ in found.values())
    unseen = any(x > 0 for name, (x, _) in found.items() if name in EXACT)
    return Answer(found, tokens, failed, unseen, replayed="distance" in found)


def recorded(path: Path) -> dict[str, tuple[str, list[Answer]]]:
    """Kind (`honest`, `twin`, `cheat`) and answers of every arm in the rows of `countersign bench detection`."""
    groups = by_arm(judged(read_rows(path)))
    return {name: (rows[0]["kind"], [_of_row(row) for row in rows]) for name, rows in groups.items()}


def live(path: Path) -> list[list[Answer]]:
    """Honest answers among the rows of `countersign attack run`, by attack. Not those that were drafted."""
    groups: dict[str, list[Answer]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["attack"] in HONEST_ON_CPU:
            groups.setdefault(row["attack"], []).extend(_of_choice(choice) for choice in row.get("choices", ()))
    return list(groups.values())


def resampled(random: np.random.Generator, arms: Sequence[Sequence[Answer]], count: int) -> list[Answer]:
    """`count` answers in blocks of `BLOCK` neighbours, each block from some arm, larger ones more often."""
    sizes = np.array([len(arm) for arm in arms])
    found: list[Answer] = []
    while len(found) < count:
        arm = arms[int(random.choice(len(arms), p=sizes / sizes.sum()))]
        start = int(random.integers(len(arm)))
        found += [arm[(start + step) % len(arm)] for step in range(min(BLOCK, len(arm)))]
    return found[:count]


def tightened(arms: Sequence[Sequence[Answer]], p: float) -> list[list[Answer]]:
    """The same answers with 1 wherever a p-value is at most `p`, and the largest share of ones in any arm as mu0.

    Real answers that sit on the boundary of their null: it holds in the arm that drifts most with nothing to spare.
    """
    share = {
        name: max(float(np.mean([answer.p.get(name, 1.0) <= p for answer in arm])) for arm in arms)
        for name in CALIBRATED
    }
    return [
        [
            replace(
                answer,
                outcomes={
                    **answer.unseen,
                    **{name: (float(found <= p), share[name]) for name, found in answer.p.items() if share[name] > 0},
                },
            )
            for answer in arm
        ]
        for arm in arms
    ]


def table(answers: Sequence[Answer]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """x, NaN where a process has none, and the profile's mu0, 1 where there is none, each (answers, 7)."""
    x, mu0 = np.full((len(answers), len(PROCESSES)), np.nan), np.ones((len(answers), len(PROCESSES)))
    for at, answer in enumerate(answers):
        for name, (value, mean) in answer.outcomes.items():
            x[at, PROCESSES.index(name)], mu0[at, PROCESSES.index(name)] = value, mean or 1.0
    return x, mu0


def _of_row(row: Mapping[str, Any]) -> Answer:
    choice = as_choice(dict(row))
    for check in choice["checks"]:
        check["reason"] = row.get(f"{check['name']} reason") or ""
    choice["verdict"] = row["verdict"]
    measured = [row[name] for name in ("gonka @128", "gonka @64", "gonka @32") if row.get(name) is not None]
    p = {name: float(row[f"{name} p"]) for name in CALIBRATED if row.get(f"{name} p") is not None}
    return replace(_of_choice(choice), similarity=1.0 - float(measured[0]) if measured else None, p=p)


def _of_choice(choice: Mapping[str, Any]) -> Answer:
    checks = choice["checks"]
    results = {check["name"]: check["result"] for check in checks}
    verification = {"verdict": choice["verdict"], "audited": True, "checks": checks, "reasons": ()}
    undecided, blame = coverage.of(verification)
    return Answer(
        outcomes(checks),
        tokens_of(dict(choice)),
        choice["verdict"] in _CAUGHT,
        any(results.get(name) in _CAUGHT for name in ("structure", "selection")),
        results.get("distance") in ("pass", "reject"),
        undecided,
        blame,
    )
