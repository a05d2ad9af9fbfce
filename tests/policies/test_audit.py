"""The audit choice."""

from __future__ import annotations

import hashlib
import hmac
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import audit
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


@given(st.integers(0, 10**7), st.one_of(st.just(-math.inf), st.floats(-50, 50)), st.floats(1e-4, 1))
def test_the_rate_stays_between_its_floor_and_all(decided: int, suspicion: float, floor: float) -> None:
    found = audit.rate(decided, suspicion, floor)
    assert floor <= found <= 1
    assert audit.rate(decided + 1, suspicion, floor) <= found <= audit.rate(decided, suspicion + 1, floor)


def test_new_backends_are_audited_in_full_and_trusted_ones_at_the_floor() -> None:
    assert audit.rate(0, -math.inf, 0.05) == 1
    assert audit.rate(audit.LEARN, -1.0, 0.05) == 1
    assert audit.rate(10 * audit.LEARN, -1.0, 0.05) == pytest.approx(0.1)
    assert audit.rate(10**6, audit.CALM, 0.05) == 0.05
    assert audit.rate(10**6, audit.ALARM, 0.05) == 1


@given(
    st.integers(0, 5000),
    st.integers(0, 5000),
    st.integers(1, 50),
    st.integers(1, 1000),
    st.floats(0, 1, exclude_max=True),
)
def test_shedding_spares_who_waits_little_and_ends_at_the_share(
    waiting: int, others: int, backends: int, limit: int, draw: float
) -> None:
    total = waiting + others
    admitted = audit.admits(waiting, total, backends, limit, draw)
    share = limit / backends
    if total >= 2 * limit:
        assert not admitted
    elif 2 * total < limit or 2 * waiting < share:
        assert admitted
    elif waiting >= share:
        assert not admitted
    assert audit.admits(waiting, total, backends, limit, 0.0) or not admitted


def test_a_flooding_backend_does_not_crowd_out_another() -> None:
    """Two backends; one sends a hundred answers for each of the other's, nothing is worked off."""
    random, waiting, shed = np.random.default_rng(0), [0, 0], [0, 0]
    for at in range(20_000):
        who = int(at % 100 == 0)
        if audit.admits(waiting[who], sum(waiting), sum(count > 0 for count in waiting) or 1, 1000, random.random()):
            waiting[who] += 1
        else:
            shed[who] += 1
    assert shed[1] == 0
    assert waiting[0] <= 510
