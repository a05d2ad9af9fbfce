"""What an examination of an evidence bundle found (`policies.examination`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from policies.case import Case
from policies.evidence import Evidence
from policies.judging import Grounds
from policies.receipt import Receipt
from policies.verification import Verification


class Outcome(IntEnum):
    """What an examination comes to: the exit code of `countersign verify` for a bundle. Of several faults the first of
    `WORST_FIRST` counts."""

    VERIFIED = 0
    UNREADABLE = 4
    BAD_SIGNATURE = 5
    UNTRUSTED_KEY = 6
    HASH_MISMATCH = 7
    NOT_DERIVABLE = 8
    NOT_IN_LOG = 9
    DAMAGED = 10
    CONTRADICTS_PINS = 11


WORST_FIRST = (
    Outcome.UNREADABLE,
    Outcome.BAD_SIGNATURE,
    Outcome.CONTRADICTS_PINS,
    Outcome.HASH_MISMATCH,
    Outcome.NOT_DERIVABLE,
    Outcome.NOT_IN_LOG,
    Outcome.DAMAGED,
    Outcome.UNTRUSTED_KEY,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question about a bundle.

    Attributes:
        about: `signature`, `key`, `evidence`, …
        fault: what it comes to where the answer is no; None where it is yes.
        words: the answer, in a sentence or two.
    """

    about: str
    fault: Outcome | None
    words: str


@dataclass(slots=True)
class Examination:
    """What was found of a bundle. What could not be read is None, or empty.

    Attributes:
        left: what could not be compared, so that the operator's word stands for it; each a few words.
        derived: the verification as it was derived again.
        grounds: what it was derived from, beside the `choices`.
    """

    findings: list[Finding] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    receipt: Receipt | None = None
    choices: Sequence[Evidence] = ()
    case: Case | None = None
    grounds: Grounds | None = None
    derived: Verification | None = None

    @property
    def outcome(self) -> Outcome:
        """What it comes to."""
        faults = {finding.fault for finding in self.findings}
        return next((fault for fault in WORST_FIRST if fault in faults), Outcome.VERIFIED)

    @property
    def faults(self) -> list[Finding]:
        """What does not hold."""
        return [finding for finding in self.findings if finding.fault is not None]

    def good(self, about: str, words: str) -> None:
        """Something holds."""
        self.findings.append(Finding(about, None, words))

    def bad(self, about: str, fault: Outcome, words: str) -> None:
        """Something does not."""
        self.findings.append(Finding(about, fault, words))
