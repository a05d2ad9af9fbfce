"""Honest backends on the boundary of what standing allows them: no rule of theirs fails more often than its null says.

Every process fails, given everything before, with a probability of at most its `mu0`, and mostly with just that. A
quarter of the backends have graded calibrated outcomes of the same mean instead of 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.standing.evidence import Answer, table
from policies.margin import FORGED_RATE
from policies.unit import EXACT, PROCESSES, REPLAYED

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

FAULT_RATES = (0.001, 0.01, 0.1)
MEANS = (0.02, 0.05, 0.2, 0.5)
"""Backends differ in what their operator allows and in how much was calibrated."""
KEYS = 8
MANY_KEYS = 24
PROMPTS = 40
SEEDS = 3
COLLUDING = 2
"""The first two keys of a scenario with colluders."""
CALM, BURST = 0.98, 0.96
"""Chances that a calm condition stays calm, and a burst a burst."""
_EXACT = len(EXACT)
_FORGED = PROCESSES.index("forged")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Units of B backends, N each.

    Attributes:
        x: (B, N, 7), NaN where a process says nothing.
        mu0: (B, N, 7) or (B, 1, 7), as `eprocess.null_means` would have it.
        fault_rate: (B,).
        keys, prompts, seeds: (B, N); −1 for prompts that never come again.
        adaptive: (B, N); while its evidence is not near its highest, a backend fails only where this is true.
        colluding: (B, N), asked by clients who try to frame it.
    """

    x: Floats
    mu0: Floats
    fault_rate: Floats
    keys: NDArray[np.intp]
    prompts: NDArray[np.intp]
    seeds: NDArray[np.intp]
    adaptive: Flags | None = None
    colluding: Flags | None = None


Scenario = Callable[[np.random.Generator, int, int], Batch]
"""Random numbers, backends, units to a batch."""


def independent(random: np.random.Generator, backends: int, units: int) -> Batch:
    """Every process at its bound at once, independent of every other."""
    return _batch(random, random.random((backends, units, len(PROCESSES))))


def dependent(random: np.random.Generator, backends: int, units: int) -> Batch:
    """Every process at its bound, and all of one unit fail together, as those of one replay may."""
    return _batch(random, np.repeat(random.random((backends, units, 1)), len(PROCESSES), axis=2))


def bursts(random: np.random.Generator, backends: int, units: int) -> Batch:
    """Conditions come and go: in a burst every process is at its bound and all fail together, in between at a tenth."""
    state = random.random(backends) < 0.5
    bad = np.empty((backends, units), np.bool_)
    for at in range(units):
        bad[:, at] = state = np.where(state, random.random(backends) < BURST, random.random(backends) >= CALM)
    shared = np.repeat(random.random((backends, units, 1)), len(PROCESSES), axis=2)
    return _batch(random, shared, np.where(bad, 1.0, 0.1)[..., None])


def scheming(random: np.random.Generator, backends: int, units: int) -> Batch:
    """A schedule that can be foreseen: at the bound just while the evidence is near its highest, else at a tenth."""
    return replace(dependent(random, backends, units), adaptive=random.random((backends, units)) < 0.1)


def repeating(random: np.random.Generator, backends: int, units: int) -> Batch:
    """Forty prompts, asked over and over under three seeds: a replay's outcomes are the prompt's own, once and for all.

    What the exact checks find depends on the seed and the moment, and is drawn anew.
    """
    prompts = random.integers(PROMPTS, size=(backends, units))
    fixed = np.repeat(random.random((backends, PROMPTS, 1)), len(REPLAYED), axis=2)
    uniform = random.random((backends, units, len(PROCESSES)))
    uniform[..., _EXACT:] = np.take_along_axis(fixed, prompts[..., None], axis=1)
    batch = _batch(random, uniform)
    return replace(batch, prompts=prompts, seeds=random.integers(SEEDS, size=(backends, units)))


def stubborn(random: np.random.Generator, backends: int, units: int) -> Batch:
    """The same, and what the exact checks find is the prompt's own too."""
    batch = repeating(random, backends, units)
    fixed = np.repeat(random.random((backends, PROMPTS, 1)), _EXACT, axis=2)
    failing = np.take_along_axis(fixed, batch.prompts[..., None], axis=1) < batch.mu0[..., :_EXACT]
    batch.x[..., :_EXACT] = failing
    return batch


def framed(random: np.random.Generator, backends: int, units: int) -> Batch:
    """Two of 24 client keys send prompts on which every calibrated check fails, more than half of the traffic."""
    batch = dependent(random, backends, units)
    theirs = random.random((backends, units)) < 0.5
    keys = random.integers(MANY_KEYS, size=theirs.shape)
    keys = np.where(theirs, random.integers(COLLUDING, size=theirs.shape), keys)
    colluding = keys < COLLUDING
    batch.x[..., _EXACT:][colluding] = 1.0
    return replace(batch, keys=keys, colluding=colluding)


def recorded(arms: Sequence[Sequence[Answer]], block: int) -> Scenario:
    """Recorded answers of honest engines, in blocks from random arms, larger ones more often."""
    tables = [table(arm) for arm in arms]
    sizes = np.array([len(arm) for arm in arms])
    starts = np.cumsum(sizes) - sizes
    everything_x, everything_mu0 = (np.concatenate([pair[part] for pair in tables]) for part in (0, 1))

    def scenario(random: np.random.Generator, backends: int, units: int) -> Batch:
        blocks = -(-units // block)
        arm = random.choice(len(arms), p=sizes / sizes.sum(), size=(backends, blocks))
        first = (random.random((backends, blocks)) * sizes[arm]).astype(np.intp)
        inside = (first[..., None] + np.arange(block)) % sizes[arm][..., None]
        chosen = (starts[arm][..., None] + inside).reshape(backends, -1)[:, :units]
        batch = _batch(random, np.ones((backends, units, len(PROCESSES))))
        mu0 = everything_mu0[chosen]
        mu0[..., :_EXACT], mu0[..., _FORGED] = batch.fault_rate[:, None, None], FORGED_RATE
        return replace(batch, x=everything_x[chosen], mu0=mu0)

    return scenario


def _batch(random: np.random.Generator, uniform: Floats, share: Floats | float = 1.0) -> Batch:
    """Outcomes from uniform numbers: `share` of the bound is the mean of each."""
    backends, units, _ = uniform.shape
    number = np.arange(backends)
    fault_rate = np.array(FAULT_RATES)[number % len(FAULT_RATES)]
    mu0 = np.empty((backends, 1, len(PROCESSES)))
    mu0[..., :_EXACT] = fault_rate[:, None, None]
    mu0[..., _EXACT:] = np.array(MEANS)[number // len(FAULT_RATES) % len(MEANS)][:, None, None]
    mu0[..., _FORGED] = FORGED_RATE
    means = mu0 * share
    x = (uniform < means).astype(np.float64)
    graded = number % 4 == 3
    calibrated = slice(_EXACT, _FORGED)
    mean = np.broadcast_to(means, x.shape)[graded, :, calibrated]
    # U^a has the mean 1/(1 + a); the smaller the uniform number, the worse the outcome, as elsewhere.
    x[graded, :, calibrated] = (1 - uniform[graded, :, calibrated]) ** (1 / mean - 1)
    nothing = np.full((backends, units), -1)
    return Batch(x, mu0, fault_rate, random.integers(KEYS, size=(backends, units)), nothing, nothing)
