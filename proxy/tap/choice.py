"""What arrived of one choice."""

from __future__ import annotations

from array import array
from typing import TypeVar

from policies.evidence import Ids
from policies.message import Transcript
from proxy.tap.claim import Claim

_LONGEST_REASON = 4096
"""Characters of a finish or stop reason; the latter may be one of the client's stop strings."""

Reason = TypeVar("Reason", str, "int | str")


class ChoiceRecord:
    """Everything that came of it so far; `prompt` says of which prompt it is one."""

    def __init__(self, prompt: int = 0) -> None:
        self.prompt = prompt
        self.ids = array("i")
        self.claim = Claim()
        self.transcript = Transcript()
        self.prompt_ids: Ids | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.experts: str | None = None
        self.faults: dict[str, None] = {}

    @property
    def started(self) -> bool:
        """Whether anything came that evidence should belong to."""
        return bool(self.ids or self.transcript or self.finish_reason is not None or self.claim.rows)


def short(reason: Reason) -> Reason:
    """Raises ValueError for a reason that is none."""
    if isinstance(reason, str) and len(reason) > _LONGEST_REASON:
        raise ValueError("a reason this long is none")
    return reason
