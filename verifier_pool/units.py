"""Units of evidence as the workers make them, each stored in the same step as its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from policies import unit
from policies.unit import REPLAYED, Unit
from policies.verification import Verification


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What the second reference made of a unit: processes that accuse there too, that do not, that it cannot judge."""

    confirmed: tuple[str, ...]
    contradicted: tuple[str, ...]
    unchecked: tuple[str, ...]


def accusing(told: Unit) -> tuple[str, ...]:
    """Processes by which a replay speaks against the backend, where that counts."""
    if told.outside:
        return ()
    return tuple(name for name in REPLAYED if told.outcomes.get(name, (0.0, 0.0))[0] > 0)


def confirmed(told: Unit, again: Unit) -> tuple[Unit, Confirmation]:
    """The unit with what accuses in it held against a second replay of the same response.

    What accuses there less counts less, and what cannot be judged there says nothing. What does not accuse stays as it
    is: so every outcome says at most what it said before, and its null mean still bounds it, however often and
    whenever the second reference fails.
    """
    outcomes, stays, falls, unchecked = dict(told.outcomes), list[str](), list[str](), list[str]()
    for name in accusing(told):
        x, mu0 = told.outcomes[name]
        second = again.outcomes.get(name)
        if second is None:
            unchecked.append(name)
            del outcomes[name]
            continue
        outcomes[name] = min(x, second[0]), mu0
        (stays if second[0] >= x else falls).append(name)
    found = Confirmation(tuple(stays), tuple(falls), tuple(unchecked))
    return msgspec.structs.replace(told, outcomes=outcomes), found


def of_unverified(verification: Verification, intent: Mapping[str, Any] | None, tokens: int = 0) -> Unit | None:
    """The unit of a response of so many tokens that nobody could check; None where no intent says whose it was."""
    declaration = (intent or {}).get("declaration")
    if not verification["backend"] or not isinstance(declaration, dict) or not declaration:
        return None
    return unit.of_unverified(verification, {str(name): str(value) for name, value in declaration.items()}, tokens)
