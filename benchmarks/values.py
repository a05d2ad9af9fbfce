"""Values on a benchmark's command line; each says what it takes, and what it got."""

from __future__ import annotations

import json
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any


def count(text: str) -> int:
    """A whole number above 0."""
    return _whole(text, 1, "a whole number above 0")


def natural(text: str) -> int:
    """A whole number from 0 on."""
    return _whole(text, 0, "a whole number from 0 on")


def seconds(text: str) -> float:
    """A finite number from 0 on."""
    return _number(text, lambda value: 0 <= value < math.inf, "a number from 0 on")


def duration(text: str) -> float:
    """A finite number above 0."""
    return _number(text, lambda value: 0 < value < math.inf, "a number above 0")


def share(text: str) -> float:
    """Above 0, up to 1."""
    return _number(text, lambda value: 0 < value <= 1, "a share above 0 and up to 1")


def part(text: str) -> float:
    """From 0 to 1."""
    return _number(text, lambda value: 0 <= value <= 1, "a share from 0 to 1")


def arguments(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"expected a JSON object ({error})") from error
    if not isinstance(found, dict):
        raise ArgumentTypeError(f"expected a JSON object, not {text!r}")
    return found


def _whole(text: str, least: int, expected: str) -> int:
    if re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text) is None or int(text) < least:
        raise ArgumentTypeError(f"expected {expected}, not {text!r}")
    return int(text)


def _number(text: str, fits: Callable[[float], bool], expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise ArgumentTypeError(f"expected {expected}, not {text!r}")
    return value
