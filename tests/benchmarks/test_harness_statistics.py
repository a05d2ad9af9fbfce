"""Figures from rounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from benchmarks.harness.statistics import (
    Figure,
    added_median,
    added_quantile,
    line,
    median,
    median_of_medians,
    quantile,
)

samples = arrays(np.float64, st.integers(1, 30), elements=st.floats(0, 1000, allow_subnormal=False))
rounds = st.dictionaries(st.integers(1, 20), samples, min_size=1, max_size=8)


@settings(max_examples=20)
@given(rounds, st.floats(-50, 50))
def test_a_constant_more_is_found_exactly(base: dict[int, NDArray[np.float64]], more: float) -> None:
    arm = {number: values + more for number, values in base.items()}
    for figure in (added_median(base, arm), added_quantile(base, arm, 0.99)):
        assert figure.value == pytest.approx(more, abs=1e-9)
        assert figure.low == pytest.approx(more, abs=1e-9)
        assert figure.high == pytest.approx(more, abs=1e-9)


def test_a_slow_round_hits_both_arms_and_cancels() -> None:
    base = {1: np.array([10.0]), 2: np.array([500.0]), 3: np.array([11.0])}
    arm = {1: np.array([12.0]), 2: np.array([502.0]), 3: np.array([13.0])}
    assert added_median(base, arm) == Figure(2, 2, 2)


def test_only_rounds_of_both_count() -> None:
    base = {1: np.array([1.0]), 2: np.array([1.0])}
    arm = {2: np.array([4.0]), 3: np.array([99.0])}
    assert added_median(base, arm).value == 3
    assert added_quantile(base, arm, 0.5).value == 3


def test_medians_of_rounds_weigh_alike_whatever_their_size() -> None:
    uneven = {1: np.full(100, 1.0), 2: np.array([5.0]), 3: np.array([9.0])}
    assert median_of_medians(uneven) == Figure(5, 1, 9)


def test_tail_spread_comes_from_whole_rounds() -> None:
    base = {number: np.zeros(50) for number in range(7)}
    arm = {number: np.full(50, float(number)) for number in range(7)}
    figure = added_quantile(base, arm, 0.99)
    assert figure.value == 6
    assert 3 <= figure.low <= figure.high <= 6
    assert quantile(arm, 0.99) == figure


def test_line_through_two_points() -> None:
    slope, intercept = line([(4, 1.04), (64, 1.64)])
    assert slope == pytest.approx(0.01)
    assert intercept == pytest.approx(1.0)
    with pytest.raises(ValueError, match="two different"):
        line([(4, 1.0), (4, 2.0)])


def test_text_of_a_figure() -> None:
    assert median([1.0, 2.0, 3.0, 4.0, 5.0]).text() == "3.00 (1.00 to 5.00)"
    assert Figure(41.6, 40.2, 44.9).text(0) == "42 (40 to 45)"
