"""Gonka's distance and LOGIC's test on small arrays and on recorded answers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from policies import rivals
from policies.evidence import Replay
from tests.policies.recorded import replayed


def test_gonka_distance_by_hand() -> None:
    claim, _ = replayed("single")[0]
    claim = replace(
        claim,
        output_ids=np.array([5], np.int32),
        claim_ids=np.array([[5, 6, 7]], np.int32),
        claim_logprobs=np.array([[-1, -2, -4]], np.float32),
    )
    replay = Replay(np.array([[5, 6, 8]], np.int32), np.array([[-1, -3, -5]], np.float32))
    # Id 7 is missing: its logprob becomes −5 − (−3 − −5) = −7.
    terms = 0 + 1 / (2 * (5 + 1e-6)) + 3 / (2 * (11 + 1e-6))
    assert rivals.gonka_distance(claim, replay, k=3) == pytest.approx(terms / 300)
    assert rivals.gonka_distance(claim, Replay(claim.claim_ids, claim.claim_logprobs), k=3) == 0


def test_gonka_tells_recorded_fp8_from_bf16() -> None:
    honest = np.array([rivals.gonka_distance(*pair) for pair in replayed("batch")])
    fp8 = np.array([rivals.gonka_distance(*pair) for pair in replayed("fp8")])
    assert (honest >= 0).all()
    assert fp8.mean() > honest.mean()
    assert fp8.max() <= 0.5


def test_gonka_has_no_distance_for_what_is_missing() -> None:
    claim, replay = replayed("single")[0]
    assert math.isnan(rivals.gonka_distance(replace(claim, claim_ids=claim.claim_ids[:-1]), replay))
    assert math.isnan(rivals.gonka_distance(claim, Replay(replay.ids[:-1], replay.logprobs[:-1])))
    masked = np.full_like(claim.claim_logprobs, -9999.0)
    assert math.isnan(rivals.gonka_distance(replace(claim, claim_logprobs=masked), replay))


def test_logic_has_no_power_over_fp8() -> None:
    """Pairing is what it throws away: FP8-rounded weights look like two draws of one distribution."""
    p = [rivals.logic_test(*pair).p for pair in replayed("fp8")]
    assert np.mean(np.array(p) < 0.05) < 0.05


floats = arrays(np.float64, st.integers(1, 30), elements=st.floats(-50, 0))


@given(floats, floats)
def test_kolmogorov_smirnov_is_symmetric_and_bounded(first: np.ndarray, second: np.ndarray) -> None:
    found = rivals.kolmogorov_smirnov(first, second)
    assert found == rivals.kolmogorov_smirnov(second, first)
    assert 0 <= found.p <= 1
    assert 0 <= found.distance <= 1
    assert rivals.kolmogorov_smirnov(first, first).p == 1


def test_kolmogorov_smirnov_rejects_different_samples_and_needs_some() -> None:
    assert rivals.kolmogorov_smirnov(np.arange(50, dtype=np.float64), np.arange(50, dtype=np.float64) + 40).p < 1e-6
    assert math.isnan(rivals.kolmogorov_smirnov(np.zeros(0), np.arange(3, dtype=np.float64)).p)
