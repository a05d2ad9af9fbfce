"""One broken rule of the structure check."""

from __future__ import annotations

from dataclasses import dataclass

from policies.checks import Result


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule's code, what is wrong in plain words, and whether it is a lie, missing evidence, or undecided.

    `level` bounds the probability that an honest answer breaks a rejecting rule: 0 for an exact one.
    """

    code: str
    text: str
    result: Result
    level: float = 0.0


def rejected(code: str, text: str, level: float = 0.0) -> Finding:
    """The evidence contradicts itself or the request, or is what an honest answer is with probability `level`."""
    return Finding(code, text, Result.REJECT, level)


def withheld(code: str, text: str) -> Finding:
    """The evidence is missing or unusable in a way only the backend can cause."""
    return Finding(code, text, Result.WITHHELD)


def undecided(code: str, text: str) -> Finding:
    """The rule cannot be applied, for want of something the operator did not declare."""
    return Finding(code, text, Result.INCONCLUSIVE)
