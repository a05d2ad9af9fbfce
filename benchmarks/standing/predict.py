"""How many answers a given cheat gets away with before quarantine, from what its single answers look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.standing.evidence import Outcomes, of_outcomes
from benchmarks.standing.turning import Backend, Clients, quantile
from policies.settings import AuditSettings, StandingSettings

REPETITIONS = 100
LONGEST = 1000
HOPELESS = 5
"""Runs after which there are no more when none of them was quarantined."""
HIGH = 0.95


@dataclass(frozen=True, slots=True)
class Prediction:
    """Generations from the change until quarantine, the one that tips it included.

    Attributes:
        median, high: quantiles at 50 % and 95 %; None where so many runs were not quarantined within `LONGEST`.
        accused: share of the runs that were quarantined.
        early: share that were quarantined while still honest, which count as 0.
    """

    median: int | None
    high: int | None
    accused: float
    early: float


def generations(
    cheat: Sequence[Outcomes],
    honest: Sequence[Outcomes],
    *,
    before: int = 200,
    keys: Sequence[str] = ("one", "two", "three"),
    operator: bool = False,
    rules: StandingSettings | None = None,
    audits: AuditSettings | None = None,
    repetitions: int = REPETITIONS,
    longest: int = LONGEST,
    seed: int = 0,
) -> Prediction:
    """Simulates a backend that serves `before` honest answers and then cheats.

    Answers are drawn from those given, with replacement, each to a prompt of its own, and go through
    `policies.standing.fold` one by one, audited at the rate that the record then has. 100 repetitions of 200 honest
    answers take about three seconds.

    Args:
        cheat, honest: outcomes of single answers as `policies.unit.Unit.outcomes` has them when replayed; what is
            not exact is left out of answers that are not audited.
        keys: names of the client keys that ask, in turn. `operator`: all of them are the operator's.

    Raises:
        ValueError: there is nothing to draw from or to simulate.
    """
    if not cheat or (before and not honest) or not keys or repetitions < 1 or longest < 1:
        raise ValueError("a prediction needs answers of the cheat, honest ones before, someone who asks, and runs")
    rules, audits = rules or StandingSettings(), audits or AuditSettings()
    clients = Clients(tuple(keys), operator)
    bad, good = [of_outcomes(found) for found in cheat], [of_outcomes(found) for found in honest]
    found: list[int | None] = []
    early = 0
    for number in range(repetitions):
        random = np.random.default_rng([seed, number])
        backend = Backend(random, clients, rules, audits)
        backend.serve(good[at] for at in random.integers(max(len(good), 1), size=before))
        if backend.record.state == "quarantined":
            early += 1
            found.append(0)
        else:
            found.append(backend.turn(bad[at] for at in random.integers(len(bad), size=longest)).quarantined)
        if len(found) == HOPELESS and not any(number is not None for number in found):
            break
    accused = sum(number is not None for number in found)
    return Prediction(quantile(found, 0.5), quantile(found, HIGH), accused / len(found), early / len(found))
