"""Canonical JSON: what RFC 8785 says, and what another implementation writes."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from policies._jcs import canonical

NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53) + 1, 2**53 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)

# RFC 8785, appendix B: bits of a double, and how it is written.
APPENDIX = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "8000000000000001": "-5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "ffefffffffffffff": "-1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "c340000000000000": "-9007199254740992",
    "4430000000000000": "295147905179352830000",
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "44b52d02c7e14af6": "1e+23",
    "44b52d02c7e14af7": "1.0000000000000001e+23",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef4f": "999999999999999900000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "41b3de4355555554": "333333333.33333325",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}


@given(VALUES)
def test_it_writes_what_another_implementation_writes(value: Any) -> None:
    written = canonical(value)
    assert written == rfc8785.dumps(value)
    assert json.loads(written, parse_int=float) == value
    assert canonical(json.loads(written)) == written


@given(st.binary(min_size=8, max_size=8))
def test_every_double(raw: bytes) -> None:
    (value,) = struct.unpack(">d", raw)
    if math.isfinite(value):
        assert canonical(value) == rfc8785.dumps(value)


@pytest.mark.parametrize(("bits", "text"), APPENDIX.items())
def test_numbers_of_the_appendix(bits: str, text: str) -> None:
    assert canonical(struct.unpack(">d", bytes.fromhex(bits))[0]) == text.encode()


def test_names_are_sorted_by_their_utf16() -> None:
    # RFC 8785, 3.2.3
    names = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\u0080", "\u00f6"]
    expected = ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]
    assert list(json.loads(canonical(dict.fromkeys(names)))) == expected


@given(st.integers())
def test_integers_that_are_no_doubles_are_the_nearest(value: int) -> None:
    try:
        near = float(value)
    except OverflowError:
        return
    assert canonical(value) == canonical(near)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, "\ud800", {"\udfff": 1}, {1: 2}, b"", object(), 10**400, {None: 1}]
)
def test_what_has_no_canonical_form_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"canonical JSON|surrogates"):
        canonical([value])


def test_nesting_that_is_too_deep_is_refused() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ValueError, match="no canonical JSON"):
        canonical(value)
