"""A verdict derived again, and held against the one that was signed.

Words, codes, counts and texts must be the same. Numbers may differ by a ten-thousandth, because processors add in
different orders, and so may numbers that stand in a text; whole ones are counts there, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from policies.evidence import Evidence
from policies.judging import Grounds, judge
from policies.verification import Verification, describe, public

TOLERANCE = 1e-4
"""Relative difference of two numbers that are the same."""
TOLD = frozenset({"id", "decided", "extra_replay", "second_reference"})
"""What a verification says besides: when it was made, that the replay was made because of what the answer or its checks
said, and what a second reference confirmed for the backend's standing. No verdict hangs on these."""
_PROBABILITIES = frozenset({"level", "p", "tail"})
_ROUNDING, _UNDERFLOW = 1e-12, 1e-300

_NUMBER = re.compile(r"(?<![\w.])[-+]?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


def derive(choices: Sequence[Evidence], grounds: Grounds) -> Verification:
    """The verification of these choices, as it is shown; `decided` is 0. Raises ValueError as `judge`."""
    verdicts, overall = judge(choices, grounds)
    return public(describe(choices, verdicts, overall, 0.0))


def differences(signed: Mapping[str, Any], derived: Mapping[str, Any]) -> list[str]:
    """In what the verification that was signed is not the derived one, in plain words; empty where it is."""
    found: list[str] = []
    if type(signed.get("decided")) not in (int, float):
        found.append("`decided` is no time")
    for name in sorted((set(signed) | set(derived)) - TOLD):
        if name not in signed or name not in derived:
            found.append(f"only one of them says `{name}`")
        else:
            _compare(name, signed[name], derived[name], found)
    return found


def _compare(where: str, signed: Any, derived: Any, found: list[str]) -> None:
    if isinstance(signed, Mapping) and isinstance(derived, Mapping):
        for name in sorted(set(signed) | set(derived)):
            if name not in signed or name not in derived:
                found.append(f"only one of them says `{where}.{name}`")
            else:
                _compare(f"{where}.{name}", signed[name], derived[name], found)
    elif isinstance(signed, list) and isinstance(derived, list):
        if len(signed) != len(derived):
            found.append(f"`{where}` has {len(signed)} entries, {len(derived)} are derived")
        for at, (one, other) in enumerate(zip(signed, derived, strict=False)):
            _compare(f"{where}[{_name(one, at)}]", one, other, found)
    elif not (signed == derived if where == "created" else _same(signed, derived, _least(where))):
        found.append(f"`{where}` is {_shown(signed)}, {_shown(derived)} is derived")


def _least(where: str) -> float:
    """What differs by no more is the same: sums that should be nothing, but probabilities may be as small as this."""
    return _UNDERFLOW if where.rpartition(".")[2] in _PROBABILITIES else _ROUNDING


def _same(signed: Any, derived: Any, least: float) -> bool:
    if isinstance(signed, bool) or isinstance(derived, bool):
        return signed is derived
    if isinstance(signed, int | float) and isinstance(derived, int | float):
        return _close(signed, derived, least)
    if isinstance(signed, str) and isinstance(derived, str):
        numbers, others = _NUMBER.findall(signed), _NUMBER.findall(derived)
        return (
            _NUMBER.sub("#", signed) == _NUMBER.sub("#", derived)
            and len(numbers) == len(others)
            and all(_close(_value(one), _value(other), _ROUNDING) for one, other in zip(numbers, others, strict=True))
        )
    return bool(signed == derived)


def _value(text: str) -> float:
    """A whole number as one."""
    return int(text) if len(text) < 4000 and not set(text) & set(".eE") else float(text)


def _close(one: float, other: float, least: float) -> bool:
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return one == other or math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=least)


def _name(entry: Any, at: int) -> str:
    return str(entry["name"]) if isinstance(entry, Mapping) and isinstance(entry.get("name"), str) else str(at)


def _shown(value: Any) -> str:
    return f"{value!r:.120}"
