"""Cells of a profile: calibration scores of one check under one condition, and the nulls fitted to them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from policies._tails import student_tail
from policies.errors import ProfileError

SHORTEST_BAND = 16
"""Positions under which one response says too little."""
FEWEST_RESPONSES = 8
"""Responses a cell needs."""
LEAST_SD = 0.05
"""Least standard deviation of a log score: a handful of responses may agree by chance."""
DIGITS = 6
"""Significant digits of a score, in the profile and wherever one is compared with it."""
EDGES = (0.0, 0.5, 1.0, 1.5, math.inf)
"""Ends of the temperature bands."""
_FLOOR_SHARE = 0.1
_Place = tuple[str, str, str, int, int]
"""Check, form, label, temperature band, length band."""


@dataclass(frozen=True, slots=True)
class Row:
    """One calibration score: of a whole response, or of the prefix of one that fills a length band.

    Attributes:
        check, form: whose score, on a replay of which form.
        arm: label of the condition.
        length: positions the score was made of, as the check counts them. Fewer than 16 count in the shortest band,
            but say nothing of its spread.
        score: 0 or more, larger is less like the reference.
        response: names the response; rows of one cell with the same name count once, with the largest score.
        tokens: output tokens of the whole response.
    """

    check: str
    form: str
    arm: str
    temperature: float
    length: int
    score: float
    response: str = ""
    tokens: int = 0


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scores of one check and form, under one condition, in one temperature and one length band.

    Attributes:
        temperature: index of the temperature band.
        length: where the length band begins.
        scores: ascending, one per response.
        mu0: upper bound on the probability of a score above all of them.
        floor: added to a score before its logarithm is taken.
        mean, sd: of log(score + floor) over the responses that score above 0; None when those are too few.
        spread_n: how many those are.
    """

    check: str
    form: str
    label: str
    temperature: int
    length: int
    scores: tuple[float, ...]
    mu0: float
    floor: float
    mean: float | None = None
    sd: float | None = None
    spread_n: int = 0

    @property
    def n(self) -> int:
        """Calibration responses."""
        return len(self.scores)

    def p(self, score: float) -> float:
        """Conformal p-value of one more response."""
        at_least = self.n - int(np.searchsorted(self.scores, score, side="left"))
        return (1 + at_least) / (self.n + 1)

    def tail(self, score: float) -> float | None:
        """P(one more honest score ≥ this) if log(score + floor) is normal; None without a spread.

        (x − mean)/(sd·√(1 + 1/n)) then follows Student's t with n − 1 degrees of freedom. Levels far below 1/n
        extrapolate that shape beyond what was seen; few responses make the bound wide by themselves.
        """
        if self.mean is None or self.sd is None:
            return None
        deviation = math.log(score + self.floor) - self.mean
        scale = max(self.sd, LEAST_SD) * math.sqrt(1 + 1 / self.spread_n)
        return student_tail(deviation / scale, self.spread_n - 1)


def fit_cells(rows: Iterable[Row], delta: float) -> tuple[Cell, ...]:
    """Cells of all conditions that have `FEWEST_RESPONSES` different responses; each `mu0` may fail with `delta` ÷
    their number.

    Raises:
        ProfileError: a row cannot be used.
    """
    groups: dict[_Place, dict[str, tuple[float, bool]]] = defaultdict(dict)
    for number, row in enumerate(rows):
        if not (math.isfinite(row.score) and row.score >= 0 and row.length >= 0 and row.temperature >= 0):
            raise ProfileError(f"a row cannot be used: {row}")
        band = max(length_band(row.length), SHORTEST_BAND)
        group = groups[row.check, row.form, row.arm, temperature_band(row.temperature), band]
        measured = rounded(row.score), row.length >= SHORTEST_BAND and row.score > 0
        response = row.response or f"#{number}"
        group[response] = max(group.get(response, measured), measured)
    kept = {place: sorted(group.values()) for place, group in groups.items() if len(group) >= FEWEST_RESPONSES}
    floors = _floors(kept)
    return tuple(_cell(place, scores, floors[place[:2]], delta / len(kept)) for place, scores in sorted(kept.items()))


def bands(length: int) -> Iterator[int]:
    """Where every length band that so many positions fill begins."""
    start = SHORTEST_BAND
    while start <= length:
        yield start
        start *= 2


def temperature_band(temperature: float) -> int:
    """Index of the temperature band: 0 for greedy, then one per edge."""
    return next((index for index, edge in enumerate(EDGES) if temperature <= edge), len(EDGES) - 1)


def length_band(positions: int) -> int:
    """Where the length band of so many positions begins; 0 under the shortest."""
    if positions < SHORTEST_BAND:
        return 0
    return SHORTEST_BAND << int(math.log2(positions // SHORTEST_BAND))


def rounded(score: float) -> float:
    """A score with the digits that profiles keep."""
    return float(f"{score:.{DIGITS - 1}e}")


def validate(cell: Cell) -> None:
    """Raises ProfileError for a cell that no fit can have made."""
    where = f"cell {cell.check}/{cell.form}/{cell.label!r}"
    if cell.length < SHORTEST_BAND or not 0 <= cell.temperature < len(EDGES):
        raise ProfileError(f"{where} has an impossible band")
    scores = np.array(cell.scores)
    if len(scores) < 2 or bool((scores[1:] < scores[:-1]).any()) or not scores[0] >= 0 or not math.isfinite(scores[-1]):
        raise ProfileError(f"{where} needs at least two scores of 0 or more, in ascending order")
    if not (0 < cell.mu0 < 1 and cell.floor > 0 and (cell.mean is None) == (cell.sd is None)):
        raise ProfileError(f"{where} has an impossible mu0, floor or spread")
    if cell.sd is not None and not (cell.sd >= 0 and math.isfinite(cell.mean or 0) and cell.spread_n >= 2):
        raise ProfileError(f"{where} has a spread from fewer than two responses, or none")


def _floors(kept: dict[_Place, list[tuple[float, bool]]]) -> dict[tuple[str, str], float]:
    """By check and form: a tenth of the median score, so that scores far under the usual ones are alike."""
    pooled: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (check, form, *_), measured in kept.items():
        pooled[check, form] += [score for score, spreads in measured if spreads]
    return {
        place: rounded(_FLOOR_SHARE * float(np.median(pooled[place]))) if pooled[place] else 1.0
        for place in {place[:2] for place in kept}
    }


def _cell(place: _Place, measured: list[tuple[float, bool]], floor: float, delta: float) -> Cell:
    mu0 = -math.expm1(math.log(delta) / len(measured))
    cell = Cell(*place, scores=tuple(score for score, _ in measured), mu0=mu0, floor=floor)
    drifting = np.array([score for score, spreads in measured if spreads])
    # What hardly ever left 0 has no spread to judge the next answer by.
    if len(drifting) < FEWEST_RESPONSES:
        return cell
    logs = np.log(drifting + floor)
    return msgspec.structs.replace(cell, mean=float(logs.mean()), sd=float(logs.std(ddof=1)), spread_n=len(drifting))
