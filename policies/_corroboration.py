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
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from policies import eprocess
from policies.eprocess import COMPONENTS, Floats
from policies.record import Heard
from policies.unit import PROCESSES, REPLAYED

LEFT_OUT = 2
"""Client keys that may collude."""
MOST_KEYS = 16
"""Keys whose pairs are tried, those with the most failing units first: leaving others out changes less."""

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
    failing = Counter(unit.key for unit in heard if any(x > 0 for x, _ in unit.outcomes.values()))
    pairs = list(combinations([key for key, _ in failing.most_common(MOST_KEYS)], LEFT_OUT))
    names = np.array([unit.key for unit in heard])
    operator = np.array([unit.operator for unit in heard])
    alone = float(_walk(heard, operator[None], fault_rate)[0]) if operator.any() else eprocess.NOTHING

    def with_all(without_two: float) -> float:
        return float(np.logaddexp(np.logaddexp(alone, without_two) - math.log(2), others))

    if len(failing) <= LEFT_OUT:
        return with_all(eprocess.NOTHING)
    least = math.inf
    # The two with the most failing units come first, and mostly settle it.
    for some in (pairs[:1], pairs[1:]):
        masks = np.array([~np.isin(names, pair) for pair in some])
        least = min(least, float(_walk(heard, masks, fault_rate).min()))
        if with_all(least) < enough < math.inf:
            break
    return with_all(least)


def speakers(heard: Sequence[Heard]) -> int:
    """Different client keys whose answers speak against the backend."""
    return len({unit.key for unit in heard if any(x > 0 for x, _ in unit.outcomes.values())})


def _walk(heard: Sequence[Heard], masks: NDArray[np.bool_], fault_rate: float) -> Floats:
    """Evidence of the replayed processes over the units of each mask (masks, units), (masks,).

    M written out as its sum over all moments j of ω_j · Π e over the units from j on.
    """
    pairs = [eprocess.null_means(unit.outcomes, fault_rate) for unit in heard]
    log_e = eprocess.steps([x for x, _ in pairs], [mu0 for _, mu0 in pairs])[:, _REPLAYED]
    taken = np.where(masks[:, ::-1, None, None], log_e[::-1], 0.0)
    log_weights = np.log([eprocess.weight(unit.n) for unit in heard])[::-1, None, None]
    since = np.cumsum(taken, axis=1) + log_weights
    largest = since.max(axis=1)
    log_m = np.full((len(masks), len(PROCESSES), COMPONENTS), eprocess.NOTHING)
    log_m[:, _REPLAYED] = largest + np.log(np.exp(since - largest[:, None]).sum(axis=1))
    return eprocess.log_evidence(log_m, REPLAYED)
