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
from policies.eprocess import Floats
from policies.record import Heard
from policies.unit import REPLAYED

LEFT_OUT = 2
"""Client keys that may collude."""
MOST_KEYS = 24
"""Keys whose pairs are tried, those with the most failing units first: leaving others out changes less."""


def log_evidence(heard: Sequence[Heard], others: float, fault_rate: float) -> float:
    """Logarithm of the evidence that can accuse: the average of what remains without the two most accusing keys and of
    what the operator's units say alone.

    Args:
        heard: units with a replay, in their order.
        others: logarithm of the evidence of the exact processes, which is added.
    """
    if not heard:
        return others
    failing = Counter(unit.key for unit in heard if any(x > 0 for x, _ in unit.outcomes.values()))
    keys = [key for key, _ in failing.most_common(MOST_KEYS)]
    operator = np.array([unit.operator for unit in heard])
    masks = [operator]
    if len(keys) > LEFT_OUT:
        names = np.array([unit.key for unit in heard])
        masks += [~np.isin(names, pair) for pair in combinations(keys, LEFT_OUT)]
    found = _walk(heard, np.array(masks), fault_rate)
    alone = found[0] if operator.any() else eprocess.NOTHING
    without_two = found[1:].min() if len(keys) > LEFT_OUT else eprocess.NOTHING
    return float(np.logaddexp(np.logaddexp(alone, without_two) - math.log(2), others))


def speakers(heard: Sequence[Heard]) -> int:
    """Different client keys whose answers speak against the backend."""
    return len({unit.key for unit in heard if any(x > 0 for x, _ in unit.outcomes.values())})


def _walk(heard: Sequence[Heard], masks: NDArray[np.bool_], fault_rate: float) -> Floats:
    """Evidence of the replayed processes over the units of each mask (masks, units), (masks,)."""
    pairs = [eprocess.null_means(unit.outcomes, fault_rate) for unit in heard]
    log_e = eprocess.steps([x for x, _ in pairs], [mu0 for _, mu0 in pairs])
    log_m = eprocess.start((len(masks),))
    for at, unit in enumerate(heard):
        taken = np.where(masks[:, at, None, None], log_e[at], 0.0)
        log_m, _ = eprocess.advance(log_m, log_m, taken, unit.n)
    return eprocess.log_evidence(log_m, REPLAYED)
