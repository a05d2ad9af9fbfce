"""What a calibration found, for a terminal."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from benchmarks.calibration.fitting import Measured
from policies import eprocess
from policies.profile import Cell, Profile, Row
from policies.settings import StandingSettings
from policies.unit import REPLAYED

BANDS = ("0", "0 to 0.5", "0.5 to 1", "1 to 1.5", "over 1.5")
"""Names of the profile's temperature bands."""
USEFUL = 30
"""Answers under which a cell says little: one response then rejects at no better level than 1/31."""
EVIDENCE = 1e-6
"""Level at which a backend is accused (`standing.alpha`)."""
MANY = 200


def summary(profile: Profile, measured: Measured) -> str:
    """The profile as tables: every cell, then the kinds of prompt."""
    title = f"{profile.responses} different answers, {profile.tokens} tokens, reference {profile.key.reference}"
    return "\n\n".join([title, cells(profile), CELLS_NOTE, kinds(measured)])


CELLS_NOTE = (
    "p ≥: the smallest level at which one response can be rejected, 1/(n+1). mu0: bound on how often an honest one\n"
    f"scores above all n. rejects: how many such answers to your own traffic accuse a backend at alpha {EVIDENCE:g}."
)


def cells(profile: Profile) -> str:
    """One line per cell: what honest answers score, and how many of them were seen."""
    header = ("check", "form", "arm", "temperature", "tokens", "n", "p ≥", "median", "largest", "mu0", "rejects")
    return _table([header, *map(_cell, profile.cells)])


def kinds(measured: Measured) -> str:
    """Scores of whole answers by kind of prompt: whether one kind drifts far from the others."""
    found = by_kind(measured)
    lines = [("kind of prompt", "answers", "median", "largest")]
    lines += [(kind, str(len(scores)), f"{median(scores):.4g}", f"{max(scores):.4g}") for kind, scores in found.items()]
    return f"{_leading(measured)} by kind of prompt\n{_table(lines)}"


def by_kind(measured: Measured) -> dict[str, list[float]]:
    """The leading check's scores of whole answers, one per answer, by kind of prompt."""
    whole: dict[str, Row] = {}
    for row in measured.rows:
        if f"{row.check} ({row.form})" == _leading(measured):
            known = whole.get(row.response)
            if known is None or (row.length, row.score) > (known.length, known.score):
                whole[row.response] = row
    scores: dict[str, list[float]] = defaultdict(list)
    for response, row in whole.items():
        scores[measured.kinds[response]].append(row.score)
    return dict(sorted(scores.items()))


def warnings(profile: Profile, measured: Measured, labels: Iterable[str]) -> list[str]:
    """What makes the profile less than it could be; empty when nothing does.

    Args:
        labels: conditions that were measured.
    """
    found = []
    small = [cell for cell in profile.cells if cell.n < USEFUL]
    if small:
        fewest = min(small, key=lambda cell: cell.n)
        found.append(
            f"{len(small)} of {len(profile.cells)} cells have under {USEFUL} answers, the smallest {fewest.n} "
            f"({_place(fewest)}): more requests make rejects sharper"
        )
    missing = set(labels) - {cell.label for cell in profile.cells}
    if missing:
        found.append(
            f"nothing could be fitted for {', '.join(sorted(missing))}: too few different or too short answers"
        )
    near = [cell for cell in profile.cells if cell.check == "distance"]
    still = [cell for cell in near if median(cell.scores) == 0]
    if still:
        found.append(
            f"in {len(still)} of {len(near)} distance cells hardly any answer differs from its replay: this backend "
            "computes as the reference does; one on another machine may not, and should be measured too"
        )
    repeated = measured.answers - profile.responses
    if repeated > 0.1 * measured.answers:
        found.append(f"{repeated} of {measured.answers} answers were repeated ones, which count once")
    return found


def _leading(measured: Measured) -> str:
    checks = {f"{row.check} ({row.form})" for row in measured.rows}
    return next((name for name in ("distance (full)", "distance (ids)") if name in checks), "")


def _cell(cell: Cell) -> tuple[str, ...]:
    return (
        cell.check,
        cell.form,
        cell.label,
        BANDS[cell.temperature],
        f"from {cell.length}",
        str(cell.n),
        f"{1 / (cell.n + 1):.3g}",
        f"{median(cell.scores):.4g}",
        f"{cell.scores[-1]:.4g}",
        f"{cell.mu0:.3g}",
        rejects(cell.mu0),
    )


def rejects(mu0: float) -> str:
    """How many answers to the operator's own traffic, each beyond what was calibrated, accuse a new backend."""
    rules = StandingSettings(alpha=EVIDENCE)
    log_m, needed = eprocess.start(), -math.log(EVIDENCE / 2) + math.log(2)
    step = eprocess.steps(*eprocess.null_means({"distance": (1.0, mu0)}, rules.fault_rate))
    for n in range(1, MANY + 1):
        log_m = eprocess.advance(log_m, step, n)
        if eprocess.log_evidence(log_m, REPLAYED) >= needed:
            return str(n)
    return f"over {MANY}"


def _place(cell: Cell) -> str:
    return f"{cell.check} ({cell.form}), {cell.label}, temperature {BANDS[cell.temperature]}, from {cell.length} tokens"


def _table(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
