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
FEWEST_DRIFTING = 3
"""Scores above 0 that a cell needs for its spread to be known."""
LEAST_SD = {"distance": 0.05}
"""Least standard deviation of a log score: a handful of responses may agree by chance. Distance means over many alike
positions and is known well from few responses."""
LEAST_SD_OF_FEW_EVENTS = 0.75
"""The same for every other check. Their scores are sums of few events (tokens that lose, experts that differ): most
responses show none or one, and a few more of them in the next one are no surprise. A sum of a handful of events
has a log standard deviation of 0.5 to 0.8; one LEAST_SD for all rejected 1 of 44 honest answers left out of their own
calibration by margin."""
UNSEEN = 1.0
"""Events of full weight that a calibration is taken to have just missed."""
EVENT_SHARE = 0.02
"""Part of an event of full weight per response under which sums of few events are alike. In short answers two events
make a high score and prove little."""
DIGITS = 6
"""Significant digits of a score, in the profile and wherever one is compared with it."""
EDGES = (0.0, 0.5, 1.0, 1.5, math.inf)
"""Ends of the temperature bands."""
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


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mean and standard deviation of log(score + floor) over n responses; the latter no less than the check allows."""

    mean: float
    sd: float
    n: int

    def tail(self, score: float, floor: float) -> float:
        """P(one more honest score ≥ this) if log(score + floor) is normal.

        (x − mean)/(sd·√(1 + 1/n)) then follows Student's t with n − 1 degrees of freedom. Levels far below 1/n
        extrapolate that shape beyond what was seen; few responses make the bound wide by themselves.
        """
        deviation = math.log(score + floor) - self.mean
        return student_tail(deviation / (self.sd * math.sqrt(1 + 1 / self.n)), self.n - 1)


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scores of one check and form, under one condition, in one temperature and one length band.

    Attributes:
        temperature: index of the temperature band.
        length: where the length band begins.
        scores: ascending, one per response.
        mu0: upper bound on the probability of a score above all of them.
        floor: added to a score before its logarithm is taken.
        spread: None where too few responses fill the band, or hardly any of them scores above 0.
    """

    check: str
    form: str
    label: str
    temperature: int
    length: int
    scores: tuple[float, ...]
    mu0: float
    floor: float
    spread: Spread | None = None

    @property
    def n(self) -> int:
        """Calibration responses."""
        return len(self.scores)

    def p(self, score: float) -> float:
        """Conformal p-value of one more response."""
        at_least = self.n - int(np.searchsorted(self.scores, score, side="left"))
        return (1 + at_least) / (self.n + 1)


def spreads(cells: Iterable[Cell], others: Iterable[Cell]) -> list[Spread]:
    """The spreads that speak for cells of one check: their own where they have some and it is a mean over many alike
    positions; that of all their scores together where it is a sum of few events. Without one, that of `others`.
    """
    cells = tuple(cells)
    if cells[0].check in LEAST_SD:
        own = [cell.spread for cell in cells if cell.spread is not None]
        if own:
            return own
    floor = max(cell.floor for cell in cells)
    for several in (cells, tuple(others)):
        pooled = _spread(cells[0].check, [score for cell in several for score in cell.scores], floor)
        if pooled is not None:
            return [pooled]
    return []


def fit_cells(rows: Iterable[Row], delta: float) -> tuple[Cell, ...]:
    """Cells of all conditions that have `FEWEST_RESPONSES` different responses; each `mu0` may fail with `delta` ÷
    their number.

    Raises:
        ProfileError: a row cannot be used.
    """
    groups: dict[_Place, dict[str, tuple[float, bool]]] = defaultdict(dict)
    seen: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for number, row in enumerate(rows):
        if not (math.isfinite(row.score) and row.score >= 0 and row.length >= 0 and row.temperature >= 0):
            raise ProfileError(f"a row cannot be used: {row}")
        band = max(length_band(row.length), SHORTEST_BAND)
        group = groups[row.check, row.form, row.arm, temperature_band(row.temperature), band]
        measured = rounded(row.score), row.length >= SHORTEST_BAND
        response = row.response or f"#{number}"
        group[response] = max(group.get(response, measured), measured)
        lengths = seen[row.check, row.form]
        lengths[response] = max(lengths.get(response, 0), row.length)
    kept = {place: sorted(group.values()) for place, group in groups.items() if len(group) >= FEWEST_RESPONSES}
    floors = _floors(kept, {place: sum(lengths.values()) for place, lengths in seen.items()})
    return tuple(
        _cell(place, scores, _floor(place, floors), delta / len(kept)) for place, scores in sorted(kept.items())
    )


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
    if not (0 < cell.mu0 < 1 and cell.floor > 0 and math.isfinite(cell.floor)):
        raise ProfileError(f"{where} has an impossible mu0 or floor")
    spread = cell.spread
    if spread is not None and not (0 < spread.sd < math.inf and math.isfinite(spread.mean) and spread.n >= 2):
        raise ProfileError(f"{where} has a spread from fewer than two responses, or none")


def _floors(
    kept: dict[_Place, list[tuple[float, bool]]], positions: dict[tuple[str, str], int]
) -> dict[tuple[str, str], float]:
    """By check and form: the mean score, so that scores far under the usual ones are alike. 1 where nothing drifts.

    Where few events make a score, `UNSEEN` of full weight are added to all that was measured.
    """
    pooled: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (check, form, *_), measured in kept.items():
        pooled[check, form] += [score for score, whole in measured if whole]
    floors = {}
    for place, scores in pooled.items():
        mean = float(np.mean(scores or [0.0]))
        unseen = 0.0 if place[0] in LEAST_SD else UNSEEN / max(positions[place], 1)
        floors[place] = rounded(mean + unseen) or 1.0
    return floors


def _floor(place: _Place, floors: dict[tuple[str, str], float]) -> float:
    few_events = place[0] not in LEAST_SD
    return rounded(floors[place[:2]] + (EVENT_SHARE / place[4] if few_events else 0.0))


def _cell(place: _Place, measured: list[tuple[float, bool]], floor: float, delta: float) -> Cell:
    mu0 = -math.expm1(math.log(delta) / len(measured))
    spread = _spread(place[0], [score for score, whole in measured if whole], floor)
    return Cell(*place, scores=tuple(score for score, _ in measured), mu0=mu0, floor=floor, spread=spread)


def _spread(check: str, scores: list[float], floor: float) -> Spread | None:
    # What hardly ever left 0 has no spread to judge the next answer by.
    if len(scores) < FEWEST_RESPONSES or np.count_nonzero(scores) < FEWEST_DRIFTING:
        return None
    logs = np.log(np.array(scores) + floor)
    least = LEAST_SD.get(check, LEAST_SD_OF_FEW_EVENTS)
    return Spread(float(logs.mean()), max(float(logs.std(ddof=1)), least), len(scores))
