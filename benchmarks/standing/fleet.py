"""The evidence of many backends at once, by the very functions of `policies.eprocess` that a single record uses.

`policies.standing` takes units one by one and decides what of each may speak. Here the same is decided for arrays, and
`units` gives any backend's units back, so that `policies.standing.fold` can be asked about them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.standing.nulls import Batch, Floats
from benchmarks.standing.turning import DECLARATION, DELTA, INTERVAL
from policies import eprocess, standing
from policies.settings import StandingSettings
from policies.unit import EXACT, PROCESSES, Unit

LOOKS = (1, 10, 100, 1000)
"""Units at which the mean of M_n + 1 − Σω is taken."""
AT_ONCE = 50
NEAR = 1.0
"""Nats below its highest at which evidence still counts as near it."""
_EXACT = len(EXACT)


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """What became of B backends' evidence.

    Attributes:
        highest: (B,) logarithm of the highest evidence less what accuses in that life at α = 1: at or above ln(1/α)
            accuses.
        last: (B,) logarithm of the evidence in the end.
        without: (B,) as `highest`, of the evidence without the replays that colluders asked for.
        counted: (B,) units that were counted.
        capital: by number of units, M_n + 1 − Σω of every backend that had as many, in its first life; without the
            replays of colluders, where there are any.
        shown: the batch with the outcomes that there were.
    """

    highest: Floats
    last: Floats
    without: Floats
    counted: NDArray[np.intp]
    capital: dict[int, Floats]
    shown: Batch


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """What of a batch may speak: the counted units of each backend moved to the front, NaN for what may not."""

    batch: Batch
    counted: NDArray[np.intp]


def heard(batch: Batch, memory: bool = True) -> Heard:
    """As standing hears units: none twice, and nothing more of the exact checks, or of replays, on a prompt that failed
    there.

    Without `memory` everything counts, which no record does.
    """
    backends, units, _ = batch.x.shape
    if not memory or (batch.prompts < 0).all():
        return Heard(batch, np.full(backends, units))
    x = batch.x.copy()
    rows = np.arange(backends)
    prompts, seeds, keys = (int(part.max()) + 1 for part in (batch.prompts, batch.seeds, batch.keys))
    known = np.zeros((backends, keys, prompts, seeds), np.bool_)
    groups = (slice(0, _EXACT), slice(_EXACT, None))
    failed = np.zeros((len(groups), backends, prompts), np.bool_)
    new = np.empty((backends, units), np.bool_)
    for at in range(units):
        key, prompt, seed = batch.keys[:, at], batch.prompts[:, at], batch.seeds[:, at]
        new[:, at] = ~known[rows, key, prompt, seed]
        known[rows, key, prompt, seed] = True
        for which, group in enumerate(groups):
            x[failed[which, rows, prompt], at, group] = np.nan
            failed[which, rows, prompt] |= new[:, at] & (x[:, at, group] > 0).any(axis=1)
    order = np.argsort(~new, axis=1, kind="stable")
    mu0 = np.broadcast_to(batch.mu0, x.shape)
    moved = replace(
        batch,
        x=np.take_along_axis(x, order[..., None], axis=1),
        mu0=np.take_along_axis(mu0, order[..., None], axis=1),
    )
    return Heard(moved, new.sum(axis=1))


def run(found: Heard, life: int | None = None) -> Course:
    """Evidence of every backend after every one of its units.

    Args:
        life: begins a new life every so many units, with the next share of the budget, as after a pardon.
    """
    batch, counted = found.batch, found.counted
    backends = len(batch.x)
    level = eprocess.start((backends,))
    muted = eprocess.start((backends,)) if batch.colluding is not None else None
    highest, without, last = (np.full(backends, eprocess.NOTHING) for _ in range(3))
    peak, spent, capital = np.full(backends, eprocess.NOTHING), 0.0, {}
    shown = batch if batch.adaptive is None else replace(batch, x=batch.x.copy(), adaptive=None)
    for at in range(int(counted.max(initial=0))):
        number = at // life + 1 if life else 1
        n = at % life + 1 if life else at + 1
        if life and n == 1:
            level = eprocess.start((backends,))
        price = math.log(number * (number + 1)) if life else 0.0
        if batch.adaptive is not None:
            # NaN stays NaN: a process that says nothing does not begin to.
            shown.x[~((last >= peak - NEAR) | batch.adaptive[:, at]), at] *= 0.0
        log_e = eprocess.steps(shown.x[:, at], batch.mu0[:, at if batch.mu0.shape[1] > 1 else 0])
        going = at < counted
        advanced = eprocess.advance(level, log_e, n)
        level = advanced if going.all() else np.where(going[:, None, None], advanced, level)
        last = eprocess.log_evidence(level)
        peak = np.maximum(peak, last)
        highest = np.maximum(highest, last - price)
        told = last
        if muted is not None and batch.colluding is not None:
            log_e[:, _EXACT:][batch.colluding[:, at]] = 0.0
            muted = eprocess.advance(muted, log_e, n)
            told = eprocess.log_evidence(muted)
            without = np.maximum(without, told)
        if number == 1:
            spent += eprocess.weight(n)
            if n in LOOKS:
                capital[n] = np.exp(told[going]) + 1 - spent
    return Course(highest, last, without, counted, capital, shown)


def units(batch: Batch, backend: int) -> list[Unit]:
    """One backend's units, in their order, as `policies.standing.fold` takes them."""
    found = []
    mu0 = batch.mu0[backend, :, :]
    for at in range(batch.x.shape[1]):
        x, means = batch.x[backend, at], mu0[at if len(mu0) > 1 else 0]
        prompt = int(batch.prompts[backend, at])
        name = f"{prompt}/{batch.keys[backend, at]}/{batch.seeds[backend, at]}" if prompt >= 0 else str(at)
        outcomes = {
            process: (float(x[place]), float(means[place]))
            for place, process in enumerate(PROCESSES)
            if not math.isnan(x[place])
        }
        found.append(
            Unit(
                id=str(at),
                at=at * INTERVAL,
                served=at * INTERVAL,
                backend="simulated",
                declaration=DECLARATION,
                key=str(batch.keys[backend, at]),
                unit=name,
                prompt=str(prompt) if prompt >= 0 else str(at),
                tokens=64,
                audited=True,
                replayed=True,
                outcomes=outcomes,
                profile="simulated",
                delta=DELTA,
            )
        )
    return found


def folded(
    batch: Batch, backend: int, alpha: float, *, life: int | None = None, once: bool = False
) -> tuple[standing.Record, int]:
    """One backend's record by `policies.standing` itself, and how often it was accused in all its lives.

    Args:
        life: it is pardoned every so many units.
        once: the first accusation suffices.
    """
    rules = StandingSettings(alpha=alpha, fault_rate=float(batch.fault_rate[backend]))
    record = standing.new("simulated", DECLARATION, 1, 0.0)
    memory: set[str] = set()
    accusations = 0
    for part in _parts(units(batch, backend), life or (AT_ONCE if once else batch.x.shape[1])):
        if life and record.n:
            record = standing.override(
                record, "pardon", by="operator", why="again", now=part[0].at, rules=rules, number=record.number + 1
            )
        before = record.accused
        result = standing.fold(record, part, memory, rules)
        record = result.record
        memory.update(result.remember)
        accusations += record.accused is not None and before is None
        if once and accusations:
            break
    return record, accusations


def _parts(everything: Sequence[Unit], size: int) -> list[Sequence[Unit]]:
    return [everything[start : start + size] for start in range(0, len(everything), size)]
