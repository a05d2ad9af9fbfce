"""One broken rule of the structure check."""

from __future__ import annotations

from dataclasses import dataclass

from policies.checks import Result


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule's code, what is wrong in plain words, and whether it is a lie, missing evidence, or undecided."""

    code: str
    text: str
    result: Result


def rejected(code: str, text: str) -> Finding:
    """The evidence contradicts itself or the request."""
    return Finding(code, text, Result.REJECT)


def withheld(code: str, text: str) -> Finding:
    """The evidence is missing or unusable in a way only the backend can cause."""
    return Finding(code, text, Result.WITHHELD)


def undecided(code: str, text: str) -> Finding:
    """The rule cannot be applied, for want of something the operator did not declare."""
    return Finding(code, text, Result.INCONCLUSIVE)
