"""Where an answer's score lies among those of honest answers, drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from policies.evidence import Evidence, Replay
from policies.profile import SHORTEST_BAND, Cell, Profile
from policies.report.escape import cut, escaped, lines
from policies.report.words import number

NAMES = {"distance": "drift_tokens", "margin": "checked", "routing": "tokens"}
"""Checks that are calibrated, and the metric that says how many positions a score is made of."""
MOST_DOTS, MOST_CELLS = 240, 10
_WIDTH, _LEFT, _ROW = 680, 190, 24


def cells_of(profile: Profile | None, check: Mapping[str, Any], choice: Evidence, replay: Replay | None) -> list[Cell]:
    """The cells that a check's score was held against."""
    name, metrics = check["name"], check["metrics"]
    if profile is None or replay is None or name not in NAMES:
        return []
    if any(metrics.get(each) is None for each in ("score", "p", "n")) or metrics["score"] < 0:
        return []
    length = max(int(metrics.get(NAMES[name]) or 0), SHORTEST_BAND)
    # Routing is judged by the same cells whatever was listed.
    forms = [replay.form] if name != "routing" else sorted({cell.form for cell in profile.cells if cell.check == name})
    return [
        cell
        for form in forms
        for cell in profile.matching(name, form=form, temperature=choice.sampling.temperature, length=length)
    ]


def drawing(cells: Sequence[Cell], score: float) -> str:
    """Honest scores as dots, one row per condition, and the answer's as a line."""
    shown = cells[:MOST_CELLS]
    floor = max(cell.floor for cell in cells)
    least = min(math.log(cell.scores[0] + floor) for cell in cells)
    most = max(math.log(cell.scores[-1] + floor) for cell in cells)
    place = math.log(score + floor)
    low, high = min(least, place), max(most, place)
    spread = (high - low) or 1.0

    def x(value: float) -> float:
        return _LEFT + 10 + (value - low) / spread * (_WIDTH - _LEFT - 30)

    height = _ROW * len(shown) + 34
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="honest scores and this answer\'s">']
    for at, cell in enumerate(shown):
        y = _ROW * at + 14
        scores = np.array(cell.scores)
        picked = scores[np.unique(np.linspace(0, len(scores) - 1, MOST_DOTS).astype(int))]
        parts.append(f'<text x="{_LEFT}" y="{y + 4}" class="label">{_label(cell)}</text>')
        parts += [f'<circle cx="{x(math.log(value + floor)):.1f}" cy="{y}" r="3"/>' for value in picked.tolist()]
    end = _ROW * len(shown) + 4
    parts.append(f'<line x1="{x(place):.1f}" x2="{x(place):.1f}" y1="2" y2="{end}" class="this"/>')
    anchor = "end" if x(place) > _WIDTH - 150 else "start" if x(place) < _LEFT + 120 else "middle"
    parts.append(f'<text x="{x(place):.1f}" y="{end + 16}" class="this {anchor}">this answer: {number(score)}</text>')
    return lines([*parts, "</svg>"])


def _label(cell: Cell) -> str:
    return escaped(cut(f"{cell.label or 'honest'}, {cell.n} answers", 30))


def words(check: Mapping[str, Any], cells: Sequence[Cell]) -> str:
    """The same in a sentence."""
    metrics, usual = check["metrics"], max(cell.scores[-1] for cell in cells)
    score, p, n = metrics["score"], metrics["p"], metrics["n"]
    if score > usual:
        tail = metrics.get("tail")
        beyond = "" if tail is None else f" By their spread, one honest answer in {_odds(tail)} would lie there."
        most = f"the largest of which is {number(usual)}"
        return f"The score {number(score)} lies beyond all {n} honest ones, {most}.{beyond}"
    return f"The score {number(score)} is one that honest answers reach: {100 * p:.3g} % of {n} score as high."


def _odds(tail: float) -> str:
    return f"{1 / tail:,.0f}" if tail > 1e-9 else "more than a billion"
