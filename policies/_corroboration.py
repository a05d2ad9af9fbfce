"""Whether an accusation by replayed checks stands without any two client keys, or by the operator's traffic alone.

The nulls of the replayed checks are calibrated: they speak of answers like those that were measured. A client who picks
prompts can look for the ones that a calibration foresaw least and send them over and over, and so frame a backend that
is honest. What the answers to other keys say is not that client's to choose. So the evidence of these checks counts as
an accusation only where it suffices with the answers of *any* two keys left out. Whatever two clients send, the
evidence that remains without them is an e-process of the others' answers, and reaches 1/α with probability at most α.
That needs three keys that speak against the backend. The operator's own traffic has no such doubt and may speak alone;
the two are averaged, so that either may accuse and both together keep to α.

Evidence is taken over the last `record.WINDOW` units with a replay, each with the weight ω of its own number: a part of
the sum that makes the whole (`policies.eprocess`), so it is never more than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from policies import eprocess
from policies.eprocess import COMPONENTS, Floats
from policies.record import Heard
from policies.unit import PROCESSES, REPLAYED

LEFT_OUT = 2
"""Client keys that may collude."""
MOST_PAIRS = 4096
"""Pairs that are looked at; what others might leave is then bounded from below."""
_TOGETHER = 64
_REPLAYED = [PROCESSES.index(name) for name in REPLAYED]


def log_evidence(heard: Sequence[Heard], others: float, fault_rate: float, enough: float = math.inf) -> float:
    """Logarithm of the evidence that can accuse: the average of what remains without the two most accusing keys and of
    what the operator's units say alone.

    Args:
        heard: units with a replay, in their order.
        others: logarithm of the evidence of the exact processes, which is added.
        enough: what accuses. Where two keys are found without which it is not reached, the search ends, and what
            remains without those is returned, though others might leave less.
    """
    if not heard:
        return others
    operator = np.array([unit.operator for unit in heard])
    walk = _Walk(heard, fault_rate)
    alone = float(walk.evidence(operator[None])[0]) if operator.any() else eprocess.NOTHING

    def with_all(without_two: float) -> float:
        return float(np.logaddexp(np.logaddexp(alone, without_two) - math.log(2), others))

    if speakers(heard) <= LEFT_OUT:
        return with_all(eprocess.NOTHING)
    names = np.array([unit.key for unit in heard])
    keys, gains = walk.gains(names)

    def without(first: NDArray[np.intp], second: NDArray[np.intp]) -> float:
        masks = (names != keys[first, None]) & (names != keys[second, None])
        return float(walk.evidence(masks).min())

    most = np.argsort(-gains)
    least = without(most[:1], most[1:LEFT_OUT])
    if with_all(least) < enough < math.inf:
        return with_all(least)  # these two mostly settle it
    first, second = np.triu_indices(len(keys), 1)
    # Leaving out a key takes no more from the evidence than its units ever added to it.
    bounds = float(walk.evidence(np.ones((1, len(heard)), np.bool_))[0]) - gains[first] - gains[second]
    order = np.argsort(bounds)
    for start in range(0, len(order), _TOGETHER):
        bound, pairs = float(bounds[order[start]]), order[start : start + _TOGETHER]
        if bound >= least or with_all(bound) >= enough:
            break
        if start >= MOST_PAIRS:
            return with_all(min(least, bound))
        least = min(least, without(first[pairs], second[pairs]))
        if with_all(least) < enough < math.inf:
            break
    return with_all(least)


def speakers(heard: Sequence[Heard]) -> int:
    """Different client keys whose answers speak against the backend."""
    return len({unit.key for unit in heard if any(x > 0 for x, _ in unit.outcomes.values())})


class _Walk:
    """The evidence of the replayed processes over some of the units, M written out as its sum over all moments j of
    ω_j · Π e over the units from j on."""

    def __init__(self, heard: Sequence[Heard], fault_rate: float) -> None:
        pairs = [eprocess.null_means(unit.outcomes, fault_rate) for unit in heard]
        steps = eprocess.steps([x for x, _ in pairs], [mu0 for _, mu0 in pairs])
        self._steps = steps[::-1, _REPLAYED]
        self._log_weights = np.log([eprocess.weight(unit.n) for unit in heard])[::-1, None, None]

    def evidence(self, masks: NDArray[np.bool_]) -> Floats:
        """Logarithm of the evidence over the units of each mask (masks, units), (masks,)."""
        taken = np.where(masks[:, ::-1, None, None], self._steps, 0.0)
        since = np.cumsum(taken, axis=1) + self._log_weights
        largest = since.max(axis=1)
        log_m = np.full((len(masks), len(PROCESSES), COMPONENTS), eprocess.NOTHING)
        log_m[:, _REPLAYED] = largest + np.log(np.exp(since - largest[:, None]).sum(axis=1))
        return eprocess.log_evidence(log_m, REPLAYED)

    def gains(self, names: NDArray[np.str_]) -> tuple[NDArray[np.str_], Floats]:
        """Keys, and by how much the units of each raise any component at most, in logarithms."""
        keys, places = np.unique(names[::-1], return_inverse=True)
        sums = np.zeros((len(keys), *self._steps.shape[1:]))
        np.add.at(sums, places, np.maximum(self._steps, 0.0))
        return keys, sums.max(axis=(1, 2))
