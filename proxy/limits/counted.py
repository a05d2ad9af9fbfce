"""What Redis says when a request asks to be let in."""

from __future__ import annotations

from typing import Any, NamedTuple


class Counted(NamedTuple):
    """The answer of `verifier_pool.link.limit_scripts.ADMIT`. Times are in ms; −1 is never."""

    refused: str
    wait: int
    requests_left: int
    requests_reset: int
    tokens_left: int
    tokens_reset: int
    budget_left: int
    budget_reset: int
    tokens_cost: int
    budget_cost: int
    at: int

    @classmethod
    def read(cls, answer: list[Any]) -> Counted:
        """What the script answered."""
        refused, *numbers = answer
        return cls(refused.decode(), *map(int, numbers))
