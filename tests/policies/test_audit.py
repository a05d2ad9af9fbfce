"""The audit choice."""

from __future__ import annotations

import hashlib
import hmac
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.audit import chosen, wants_full


@given(secret=st.binary(), id=st.text(), rate=st.floats(0, 1))
def test_choice_is_the_hmac_as_a_fraction_below_the_rate(secret: bytes, id: str, rate: float) -> None:
    digest = hmac.new(secret, id.encode("utf-8", "surrogatepass"), hashlib.sha256).digest()
    assert chosen(secret, id, rate) == (int.from_bytes(digest[:8], "big") < rate * 2**64)


@given(secret=st.binary(), id=st.text())
def test_nothing_at_zero_everything_at_one(secret: bytes, id: str) -> None:
    assert not chosen(secret, id, 0)
    assert not chosen(secret, id, -1)
    assert not chosen(secret, id, math.nan)
    assert chosen(secret, id, 1)
    assert chosen(secret, id, math.inf)


@given(id=st.text(), low=st.floats(0, 1), high=st.floats(0, 1))
def test_a_higher_rate_keeps_every_choice(id: str, low: float, high: float) -> None:
    low, high = sorted((low, high))
    assert chosen(b"secret", id, low) <= chosen(b"secret", id, high)


def test_the_rate_is_met_and_secrets_choose_apart() -> None:
    ids = [f"{i:032x}" for i in range(20_000)]
    picked = [chosen(b"one", id, 0.05) for id in ids]
    other = [chosen(b"two", id, 0.05) for id in ids]
    assert sum(picked) / len(ids) == pytest.approx(0.05, abs=0.006)
    assert sum(a and b for a, b in zip(picked, other, strict=True)) < 150


def test_the_form_is_drawn_apart_from_the_audit() -> None:
    ids = [f"{i:032x}" for i in range(20_000)]
    audited = [chosen(b"one", id, 0.25) for id in ids]
    full = [wants_full(b"one", id, 0.25) for id in ids]
    assert sum(full) / len(ids) == pytest.approx(0.25, abs=0.012)
    both = sum(a and b for a, b in zip(audited, full, strict=True))
    assert both / sum(audited) == pytest.approx(0.25, abs=0.024)
    assert all(wants_full(b"one", id, 1.0) for id in ids[:50])
    assert not any(wants_full(b"one", id, 0.0) for id in ids[:50])
