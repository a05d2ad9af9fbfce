"""Request values read as leniently as vLLM reads them (pydantic's lax mode).

Every function returns None for a value vLLM would refuse; such a value is passed on, so that vLLM refuses it.
"""

from __future__ import annotations

import math
from typing import Any

_TRUE = {"1", "true", "t", "yes", "y", "on"}
_FALSE = {"0", "false", "f", "no", "n", "off"}


def boolean(value: Any) -> bool | None:
    """A flag: true/false, 0/1, or one of pydantic's words."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return bool(value) if value in (0, 1) else None
    if isinstance(value, str):
        word = value.lower()
        return True if word in _TRUE else False if word in _FALSE else None
    return None


def integer(value: Any) -> int | None:
    """A whole number, also as a float or a string."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return None
    return None


def number(value: Any) -> float | None:
    """A finite number, also as a string."""
    if not isinstance(value, int | float | str):
        return None
    try:
        result = float(value)
    except (ValueError, OverflowError):
        return None
    return result if math.isfinite(result) else None


def integers(value: Any) -> tuple[int, ...]:
    """Whole numbers of a list; anything else counts as none."""
    return tuple(item for item in map(integer, value) if item is not None) if isinstance(value, list) else ()


def strings(value: Any) -> tuple[str, ...]:
    """A string or a list of strings; anything else counts as none."""
    if isinstance(value, str):
        return (value,)
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()
