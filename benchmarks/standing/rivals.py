"""Other rules that accuse, on the same answers: gonka's two, and a lifetime e-process.

*z > 1* (gonka, documented): of n validated answers x failed; accused as soon as (x − n·p0)/√(n·p0·(1 − p0)) > 1, where
p0 is the rate at which honest answers fail. *SPRT* (gonka's newer code): Wald's log likelihood ratio of the rate p1
against p0, kept for life and held at −H or above (the most a good history can save up), accused at H. p0 = 0.05, p1 =
0.10 and H = ln(1/α) are not gonka's numbers, which differ from model to model, but those under which SPRT needs the 300
validations to detect 10 % of failures, and 21 to detect 50 %, that are known of it at α = 0.001.
*Lifetime* is `policies.betting`: the same processes and weights as standing's, with its own stakes, begun once
and multiplied for life.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.standing.evidence import Answer, table
from policies import betting
from policies.margin import FORGED_RATE
from policies.unit import EXACT, PROCESSES

P0 = 0.05
P1 = 0.10

Accusing = NDArray[np.bool_]
"""(…, n): the rule accuses after that unit."""


def z_rule(failed: NDArray[np.bool_], p0: float = P0) -> Accusing:
    """Gonka's documented rule, looked at after every answer."""
    n = np.arange(1, failed.shape[-1] + 1)
    accusing: Accusing = np.cumsum(failed, axis=-1) - n * p0 > np.sqrt(n * p0 * (1 - p0))
    return accusing


def sprt(failed: NDArray[np.bool_], alpha: float, p0: float = P0, p1: float = P1) -> Accusing:
    """Wald's sequential test, held within ±ln(1/alpha)."""
    height = -math.log(alpha)
    steps = np.where(failed, math.log(p1 / p0), math.log((1 - p1) / (1 - p0)))
    ratio, accusing = np.zeros(failed.shape[:-1]), np.zeros(failed.shape, np.bool_)
    for at in range(failed.shape[-1]):
        ratio = np.maximum(ratio + steps[..., at], -height)
        accusing[..., at] = ratio >= height
    return accusing


def lifetime(answers: Sequence[Answer], fault_rate: float, alpha: float) -> Accusing:
    """Evidence 1/alpha of the whole life at once, (n,)."""
    x, mu0 = table(answers)
    running = []
    for at, name in enumerate(PROCESSES):
        heard = ~np.isnan(x[:, at])
        values = np.where(heard, x[:, at], 0.0)
        if name in EXACT or name == "forged":
            rate = fault_rate if name in EXACT else FORGED_RATE
            # Units that say nothing leave the evidence where it was.
            grown = np.concatenate([[0.0], betting.bernoulli(values[heard] > 0, rate)])[np.cumsum(heard)]
        else:
            grown = betting.bounded(values, np.where(heard, mu0[:, at], 1.0))
        running.append(grown)
    accusing: Accusing = betting.average(running, [1 / len(PROCESSES)] * len(PROCESSES)) >= -math.log(alpha)
    return accusing


def first(accusing: Accusing, change: int) -> tuple[NDArray[np.bool_], list[int | None]]:
    """Per sequence: whether it was accused before `change`, and the units from there until it was, None for never.

    Sequences that were accused before are left out of the second.
    """
    early = np.asarray(accusing[:, :change].any(axis=-1))
    found: list[int | None] = []
    for sequence in accusing[~early, change:]:
        places = np.flatnonzero(sequence)
        found.append(int(places[0]) + 1 if len(places) else None)
    return early, found
