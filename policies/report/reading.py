"""A verification as it can be shown: whoever signed it may have put anything into it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_TEXTS = ("verdict", "backend", "model")


def readable(verification: Mapping[str, Any]) -> dict[str, Any]:
    """The same fields with the types that they should have; what has another one is left out, or empty."""
    found: dict[str, Any] = {name: _text(verification.get(name)) for name in _TEXTS}
    found["reasons"] = [_text(reason) for reason in _list(verification.get("reasons"))]
    found["checks"] = _checks(verification.get("checks"))
    found["created"], found["decided"] = (_number(verification.get(name)) for name in ("created", "decided"))
    found["choices"] = [
        {"index": choice.get("index"), "verdict": _text(choice.get("verdict")), "checks": _checks(choice.get("checks"))}
        for choice in _list(verification.get("choices"))
        if isinstance(choice, Mapping)
    ]
    return found


def _checks(given: object) -> list[dict[str, Any]]:
    return [
        {
            "name": _text(check.get("name")),
            "result": _text(check.get("result")),
            "reason": _text(check.get("reason")),
            "level": _number(check.get("level")),
            "metrics": _numbers(check.get("metrics")),
        }
        for check in _list(given)
        if isinstance(check, Mapping)
    ]


def _numbers(given: object) -> dict[str, float | int | None]:
    items = given.items() if isinstance(given, Mapping) else ()
    return {str(name): _number(value) for name, value in items}


def _number(value: object) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
