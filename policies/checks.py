"""The result of one check and the verdict of one generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Result(StrEnum):
    """What one check says.

    `withheld` is evidence missing or unusable in a way only the backend can cause.
    """

    PASS = "pass"
    REJECT = "reject"
    INCONCLUSIVE = "inconclusive"
    WITHHELD = "withheld"


class VerdictWord(StrEnum):
    """What the checks of one generation say together."""

    PASS = "pass"
    REJECT = "reject"
    WITHHELD = "withheld"
    INCONCLUSIVE = "inconclusive"
    UNAUDITED = "unaudited"
    UNVERIFIED = "unverified"


@dataclass(frozen=True, slots=True)
class Check:
    """One family of tests on one generation.

    Attributes:
        name: `structure`, `selection`, `distance`, `margin` or `routing`.
        result: what it says.
        reason: a short code with plain words after a colon, empty on a pass.
        by_request: the check does not apply because of what the client asked for.
        level: upper bound on the probability that an honest backend's answer is rejected like this,
            set on a reject by a statistical check and on every exact one (0.0).
        metrics: numbers a reader can follow up; units in the check's own docstring.
    """

    name: str
    result: Result
    reason: str = ""
    by_request: bool = False
    level: float | None = None
    metrics: dict[str, float | int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The checks of one generation combined."""

    word: VerdictWord
    checks: tuple[Check, ...]
    reasons: tuple[str, ...] = ()
    audited: bool = False
