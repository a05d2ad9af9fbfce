"""JSON in the one form that RFC 8785 (JSON Canonicalization Scheme) gives each value: names sorted by their UTF-16 code
units, no spaces, numbers as ECMAScript writes doubles, UTF-8.

The same values make the same bytes in every language that has the scheme, so whoever has the values can rebuild what
was signed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_LARGEST = 2**53 - 1
"""Integers beyond it are no doubles, and are written as the nearest one."""
_text = json.encoder.encode_basestring


def canonical(value: Any) -> bytes:
    """The bytes of None, booleans, numbers, text, and lists and mappings of these.

    Raises:
        ValueError: a number is not finite, text is not Unicode (a lone surrogate), or something has no JSON at all.
    """
    try:
        return _written(value).encode()
    except (OverflowError, RecursionError) as error:
        raise ValueError("there is no canonical JSON for this") from error


def is_canonical(value: Any, data: bytes) -> bool:
    """Whether these are the bytes that `canonical` makes of a value; not, where it makes none."""
    try:
        return canonical(value) == data
    except ValueError:
        return False


def _written(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return str(int(value)) if abs(value) <= _LARGEST else _double(float(value))
    if isinstance(value, float):
        return _double(value)
    if isinstance(value, Mapping):
        names = list(value)
        if not all(isinstance(name, str) for name in names):
            raise ValueError("names of canonical JSON are text")
        names.sort(key=_units)
        return "{" + ",".join([f"{_text(name)}:{_written(value[name])}" for name in names]) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join([_written(each) for each in value]) + "]"
    raise ValueError(f"a {type(value).__name__} has no canonical JSON")


def _units(name: str) -> bytes:
    return name.encode("utf-16-be")


def _double(value: float) -> str:
    """As `Number.prototype.toString` (ECMA-262): shortest digits that read back, plain from 1e-6 up to below 1e21."""
    if not math.isfinite(value):
        raise ValueError("canonical JSON has finite numbers only")
    if value == 0:
        return "0"
    if value < 0:
        return "-" + _double(-value)
    text = repr(value)
    if "e" not in text and value >= 1e-4:
        return text.removesuffix(".0")
    mantissa, _, exponent = text.partition("e")
    whole, _, part = mantissa.partition(".")
    part = part if part != "0" else ""
    digits = (whole + part).lstrip("0")
    point = len(whole) + int(exponent or 0) - (len(whole + part) - len(digits))
    digits = digits.rstrip("0")
    if len(digits) <= point <= 21:
        return digits.ljust(point, "0")
    if 0 < point <= 21:
        return f"{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return "0." + "0" * -point + digits
    sign, power = ("+", point - 1) if point > 0 else ("-", 1 - point)
    return f"{digits[0]}{'.' if len(digits) > 1 else ''}{digits[1:]}e{sign}{power}"
