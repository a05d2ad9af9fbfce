"""Units and records for the tests of standing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policies import standing
from policies.record import Record
from policies.settings import StandingSettings
from policies.unit import Unit

RULES = StandingSettings()
DECLARATION = {"model": "m", "runtime": "vllm-0.32-v2", "precision": "bf16", "engine": "x", "speculative": ""}
START = 1_790_000_000.0
MU0 = 0.04


def unit(number: int, /, *failing: str, key: str = "", replay: bool = True, **fields: Any) -> Unit:
    """Unit of that number, whose named processes fail and all others pass."""
    outcomes = dict.fromkeys(("selection", "structure", "withheld"), (0.0, 0.0))
    if replay:
        outcomes |= {"distance": (0.0, MU0), "margin": (0.0, MU0), "forged": (0.0, 0.0)}
    outcomes |= {name: (1.0, MU0 if name in ("distance", "margin", "routing") else 0.0) for name in failing}
    known: dict[str, Any] = {
        "id": f"{number:032x}",
        "at": START + number,
        "backend": "b",
        "declaration": DECLARATION,
        "key": key or f"key{number % 5}",
        "unit": f"unit{number}",
        "prompt": f"prompt{number}",
        "tokens": 100,
        "verdict": "reject" if failing else "pass",
        "audited": replay,
        "replayed": replay,
        "outcomes": outcomes,
        "profile": "profile",
        "delta": 1e-6,
        "served": START + number - 1,
    }
    return Unit(**known | fields)


def record(units: Sequence[Unit] = (), rules: StandingSettings = RULES, number: int = 1) -> Record:
    """A record after these units."""
    return standing.fold(standing.new("b", DECLARATION, number, START), units, set(), rules).record


def honest(count: int, first: int = 0, **fields: Any) -> list[Unit]:
    """Units that pass."""
    return [unit(first + at, **fields) for at in range(count)]


def after(known: Record, units: Sequence[Unit], seen: set[str] | None = None) -> Record:
    """The record after these units."""
    return standing.fold(known, units, seen or set(), RULES).record


def until_quarantine(known: Record, units: Sequence[Unit]) -> int | None:
    """How many of the units it takes."""
    for count, one in enumerate(units, 1):
        known = after(known, [one])
        if known.state == "quarantined":
            return count
    return None
