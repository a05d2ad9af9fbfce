"""What the verdicts on one attack amount to: single-response detection, and responses until the evidence suffices.

One unit of evidence is one generation. Exact checks (structure, selection) and withheld evidence bet against a stated
fault rate; distance, margin and routing bet their calibrated scores (`policies.betting`). The processes are averaged
with weights fixed here. Responses come in no order that means anything, so figures are medians over random orders.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.adversary.base import Cheat
from benchmarks.adversary.traffic import Row
from policies import betting, margin

LEVEL = 1e-6
FAULT_RATE = 1e-3
"""Rate per generation at which an honest backend may fail an exact check or leave evidence out."""
EXACT = ("structure", "selection", "withheld")
CALIBRATED = ("distance", "margin", "routing")
WEIGHTS = (1 / 7,) * 7
"""One process per exact and per calibrated check, and one for margin's forged tokens."""
ORDERS = 200
CAUGHT = frozenset({"reject", "withheld"})


@dataclass(frozen=True, slots=True)
class Summary:
    """One attack's figures.

    Attributes:
        verdicts: how often each word came; `error` for requests without a verdict because they failed.
        judged: responses with a verdict that says something, detection's denominator.
        detected: those rejected or withheld.
        low, high: Wilson interval of the detection at 95 %.
        responses, tokens: until evidence 1/LEVEL, medians over random orders; None when most orders never get there.
        caught_by: checks that rejected (or `withheld`) and in how many responses, most first.
        first: the checks that caught the first detected response.
    """

    name: str
    attack: type[Cheat]
    sent: int
    verdicts: dict[str, int]
    judged: int
    detected: int
    low: float
    high: float
    responses: int | None
    tokens: int | None
    caught_by: dict[str, int]
    first: tuple[str, ...]
    note: str = ""

    @property
    def ok(self) -> bool:
        """What should be is: a cheat that should be caught was, an honest variant was never detected."""
        if self.attack.honest:
            return self.detected == 0 and self.judged > 0
        return not self.attack.caught_by or self.responses is not None


def summarise(attack: type[Cheat], rows: Sequence[Row], note: str = "") -> Summary:
    """The figures of one attack's rows."""
    words = Counter("error" if row["error"] and row["verdict"] == "missing" else row["verdict"] for row in rows)
    judged = [row for row in rows if row["verdict"] not in ("missing", "unverified")]
    detected = [row for row in judged if row["verdict"] in CAUGHT]
    low, high = wilson(len(detected), len(judged))
    responses, tokens = until_evidence(judged)
    catches = [_catches(row) for row in detected]
    counted = Counter(name for names in catches for name in names)
    return Summary(
        attack.name,
        attack,
        len(rows),
        dict(words),
        len(judged),
        len(detected),
        low,
        high,
        responses,
        tokens,
        dict(counted.most_common()),
        catches[0] if catches else (),
        note,
    )


def until_evidence(rows: Sequence[Row], level: float = LEVEL, orders: int = ORDERS) -> tuple[int | None, int | None]:
    """Responses and tokens until evidence 1/`level`; medians over random orders, None when most never reach it."""
    if not rows:
        return None, None
    random = np.random.default_rng(0)
    tokens = np.array([sum(tokens_of(choice) for choice in row["choices"]) for row in rows])
    shuffled = [random.permutation(len(rows)) for _ in range(orders)]
    choices = [choice for row in rows for choice in row["choices"]]
    starts = np.cumsum([0, *(len(row["choices"]) for row in rows)])
    units = [[place for at in order for place in range(starts[at], starts[at + 1])] for order in shuffled]
    owner = np.repeat(np.arange(len(rows)), np.diff(starts))
    crossings: list[tuple[float, float]] = []
    for order, own, running in zip(shuffled, units, log_evidence(choices, units), strict=True):
        at = betting.first_over(running, level)
        if at is None:
            crossings.append((math.inf, math.inf))
        else:
            place = int(np.flatnonzero(order == owner[own[at - 1]])[0])
            crossings.append((place + 1, float(tokens[order[: place + 1]].sum())))
    responses, used = (float(np.median([pair[column] for pair in crossings])) for column in (0, 1))
    return (math.ceil(responses), math.ceil(used)) if math.isfinite(responses) else (None, None)


def log_evidence(choices: Sequence[dict[str, Any]], orders: Sequence[Sequence[int]]) -> betting.LogEvidence:
    """Running log evidence over generations in several orders of them.

    Args:
        orders: for each, the places in `choices`, each once.

    Returns:
        float64 (orders, n).
    """
    places = np.asarray(orders, np.intp).reshape(len(orders), -1)
    running = [
        betting.bernoulli(np.array([_failed(choice, name) for choice in choices], np.bool_)[places], FAULT_RATE)
        for name in EXACT
    ]
    running += [_calibrated([_metrics(choice, name) for choice in choices], places) for name in CALIBRATED]
    margins = [_metrics(choice, "margin") for choice in choices]
    running.append(np.array([margin.forged_evidence([margins[at] for at in own]) for own in places.tolist()]))
    return betting.average(running, WEIGHTS)


def _calibrated(metrics: Sequence[Mapping[str, Any]], places: NDArray[np.intp]) -> betting.LogEvidence:
    """`betting.of_check` of each order at once."""
    heard = np.array([found.get("exceeds") is not None for found in metrics], np.bool_)
    exceeds = np.array([bool(found.get("exceeds")) for found in metrics], np.bool_)
    counts = np.array([int(found.get("n_least") or 1) for found in metrics], np.float64)
    groups = max((int(found.get("groups") or 1) for found in np.array(metrics, object)[heard]), default=1)
    judged = places[heard[places]].reshape(len(places), -1)
    running = betting.calibrated(exceeds[judged], counts[judged], groups)
    started = np.concatenate([np.zeros((len(places), 1)), running], axis=1)
    return np.take_along_axis(started, np.cumsum(heard[places], axis=1), axis=1)


def tokens_of(choice: dict[str, Any]) -> int:
    """Output tokens of one generation."""
    return max((int(check["metrics"].get("tokens") or 0) for check in choice["checks"]), default=0)


def wilson(hits: int, of: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson interval of a proportion at 95 %; (0, 1) of nothing."""
    if not of:
        return 0.0, 1.0
    share, spread = hits / of, z * z / of
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / of + spread / (4 * of)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def _failed(choice: dict[str, Any], name: str) -> bool:
    if name == "withheld":
        return any(check["result"] == "withheld" for check in choice["checks"])
    return any(check["name"] == name and check["result"] == "reject" for check in choice["checks"])


def _metrics(choice: dict[str, Any], name: str) -> dict[str, Any]:
    """A check's metrics; empty, which says nothing, where it did not run."""
    return next((check["metrics"] for check in choice["checks"] if check["name"] == name), {})


def _catches(row: Row) -> tuple[str, ...]:
    """Checks that speak against one response; withheld evidence under that name."""
    found: dict[str, None] = {}
    for choice in row["choices"]:
        for check in choice["checks"]:
            if check["result"] in CAUGHT:
                found[check["name"] if check["result"] == "reject" else "withheld"] = None
    return tuple(found)
