"""E-processes: supermartingales under their nulls, few false alarms, and fast against cheats."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import betting

PATHS = 10_000


def false_alarms(running: betting.LogEvidence, alpha: float) -> float:
    return float((running.max(axis=1) >= -math.log(alpha)).mean())


@given(st.floats(1e-5, 0.6), st.integers(1, 8), st.floats(0, 1))
def test_expected_bernoulli_capital_is_one_at_the_rate_and_less_below(rate: float, n: int, share: float) -> None:
    outcomes = np.array(list(itertools.product([0, 1], repeat=n)))
    capital = np.exp(betting.bernoulli(outcomes, rate))
    for true, limit in ((rate, 1.0), (rate * share, 1.0)):
        weights = (true**outcomes * (1 - true) ** (1 - outcomes)).prod(axis=1)
        expected = weights @ capital
        assert (expected <= limit + 1e-9).all()
        if true == rate:
            assert expected == pytest.approx(np.ones(n))


@given(st.floats(1e-4, 0.999), st.lists(st.floats(0, 1), min_size=2, max_size=2), st.integers(1, 7))
def test_expected_bounded_capital_is_at_most_one_for_any_law_of_mean_mu0(mu0: float, ends: list[float], n: int) -> None:
    low, high = mu0 * ends[0], mu0 + (1 - mu0) * ends[1]
    if high - low < 1e-9:
        return
    above = (mu0 - low) / (high - low)
    choices = np.array(list(itertools.product([0, 1], repeat=n)))
    capital = np.exp(betting.bounded(np.where(choices, high, low), mu0))
    weights = (above**choices * (1 - above) ** (1 - choices)).prod(axis=1)
    assert weights @ capital == pytest.approx(np.ones(n))


def test_an_adversary_that_adapts_to_the_capital_gains_nothing() -> None:
    rng = np.random.default_rng(5)
    paths, units, mu0 = 3000, 30, 0.2
    bets = np.zeros((paths, units))
    for unit in range(units):
        rich = betting.bounded(bets[:, :unit], mu0)[:, -1] > 0 if unit else np.zeros(paths, bool)
        high = np.where(rich, 1.0, 0.4)
        bets[:, unit] = np.where(rng.random(paths) < mu0 / high, high, 0.0)
    assert (betting.bounded(bets, mu0).max(axis=1) >= math.log(20)).mean() <= 0.05 + 0.012


def test_false_alarms_at_the_edge_of_the_null_stay_within_alpha() -> None:
    rng = np.random.default_rng(7)
    paths = [betting.bernoulli(rng.random((PATHS, 60)) < rate, rate) for rate in (0.001, 0.05, 0.4)]
    for mu0 in (0.02, 0.2, 0.7):
        for bets in (rng.random((PATHS, 40)) < mu0, rng.beta(mu0, 1 - mu0, (PATHS, 40)), np.full((1, 40), mu0)):
            paths.append(betting.bounded(bets, mu0))
    for running in paths:
        for alpha in (0.2, 0.05, 0.01):
            assert false_alarms(running, alpha) <= alpha + 3 * math.sqrt(alpha / PATHS)


@pytest.mark.parametrize("n", [3, 24, 200])
def test_the_calibrated_null_is_a_fair_game_on_average_over_calibrations(n: int) -> None:
    units = 10
    outcomes = np.array(list(itertools.product([0, 1], repeat=units)))
    capital = np.exp(betting.calibrated(outcomes, n)[:, -1])
    # The chance of exceeding all of n is Beta(1, n): integrate s exceedances of it exactly.
    s = outcomes.sum(axis=1)
    law = np.array(
        [n * math.exp(math.lgamma(k + 1) + math.lgamma(n + units - k) - math.lgamma(n + units + 1)) for k in s]
    )
    assert law.sum() == pytest.approx(1)
    assert law @ capital <= 1 + 1e-9
    assert law @ capital > 0.5


def test_calibrated_evidence_raises_no_false_alarms_over_shared_calibrations() -> None:
    rng = np.random.default_rng(11)
    units, sizes = 30, np.array([12, 40, 40])
    # Three groups whose bars come from the same calibration responses, the worst they can: they err together.
    luck = rng.random((PATHS, 1))
    group = rng.integers(0, 3, (PATHS, units))
    several = rng.random((PATHS, units)) < 1 - luck ** (1 / sizes[group])
    one = rng.random((PATHS, units)) < 1 - luck ** (1 / 24)
    for running in (betting.calibrated(several, sizes[group], 3), betting.calibrated(one, 24)):
        for alpha in (0.2, 0.05, 0.01):
            assert false_alarms(running, alpha) <= alpha + 3 * math.sqrt(alpha / PATHS)


@given(st.lists(st.booleans(), min_size=1, max_size=25), st.integers(0, 24), st.integers(1, 300), st.integers(1, 40))
def test_one_more_exceedance_never_lowers_calibrated_evidence(
    exceeds: list[bool], at: int, n: int, groups: int
) -> None:
    more = list(exceeds)
    more[at % len(more)] = True
    before, after = betting.calibrated(exceeds, n, groups), betting.calibrated(more, n, groups)
    assert (after >= before - 1e-9).all()
    assert (betting.calibrated(exceeds, n, groups + 1) <= before + 1e-9).all()


def test_what_calibrated_evidence_costs() -> None:
    found = {n: betting.first_over(betting.calibrated(np.ones(99), n, 12), 1e-6) for n in (12, 24, 48, 100, 400)}
    assert found == {12: 18, 24: 10, 48: 7, 100: 5, 400: 4}
    assert betting.calibrated(np.zeros(50), 24)[-1] <= 0
    assert betting.calibrated([], 24).shape == (0,)
    assert np.isfinite(betting.calibrated(np.ones(20_000), 1000, 40)).all()
    for n, groups in ((0, 1), (5, 0), (math.nan, 1)):
        with pytest.raises(ValueError, match="at least one"):
            betting.calibrated([True], n, groups)


def test_units_of_different_nulls_share_one_process() -> None:
    rng = np.random.default_rng(3)
    means = rng.choice([0.05, 0.3, 0.8], 60)
    running = betting.bounded(rng.random((PATHS, 60)) < means, means)
    assert (running.max(axis=1) >= math.log(20)).mean() <= 0.05 + 0.007
    assert betting.bounded([1.0, 1.0], [0.1, 1.0])[1] == pytest.approx(betting.bounded([1.0], 0.1)[0])


def test_what_it_costs_to_reach_one_in_a_million() -> None:
    caught = {mu0: betting.first_over(betting.bounded(np.ones(99), mu0), 1e-6) for mu0 in (0.02, 0.05, 0.1, 0.3, 0.5)}
    assert caught == {0.02: 4, 0.05: 6, 0.1: 7, 0.3: 13, 0.5: 23}
    assert betting.first_over(betting.bernoulli(np.ones(9), 1e-3), 1e-6) == 3
    half = np.tile([1.0, 0.0], 200)
    found = betting.first_over(betting.bounded(half, 0.1), 1e-6)
    assert found is not None
    assert found < 50
    one_in_ten = np.tile([1.0] + [0.0] * 9, 50)
    found = betting.first_over(betting.bernoulli(one_in_ten, 1e-3), 1e-6)
    assert found is not None
    assert found < 60


def test_honest_units_never_gain() -> None:
    assert (np.diff(betting.bounded(np.zeros(50), 0.1)) <= 0).all()
    assert (np.diff(betting.bernoulli(np.zeros(50), 1e-3)) <= 0).all()


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=30),
    st.lists(st.booleans(), min_size=1, max_size=30),
    st.floats(0.01, 0.99),
)
@settings(max_examples=50)
def test_more_suspicion_never_lowers_the_evidence(bets: list[float], outcomes: list[bool], mu0: float) -> None:
    more = [min(1.0, bet + 0.1) for bet in bets]
    assert (betting.bounded(more, mu0) >= betting.bounded(bets, mu0) - 1e-12).all()
    worse = [True, *outcomes[1:]]
    assert (betting.bernoulli(worse, mu0 / 2) >= betting.bernoulli(outcomes, mu0 / 2) - 1e-12).all()


def test_an_average_is_no_better_than_its_best_part_and_no_worse_than_its_share() -> None:
    rng = np.random.default_rng(1)
    first = betting.bernoulli(np.ones(20), 1e-3)
    second = betting.bounded(rng.random(20) * 0.1, 0.2)
    both = betting.average([first, second], [0.5, 0.5])
    assert (both <= np.maximum(first, second) + 1e-12).all()
    assert (both >= first + math.log(0.5) - 1e-12).all()
    assert betting.average([first], [0.0]).tolist() == [-math.inf] * 20


def test_nothing_overflows_or_is_empty_by_surprise() -> None:
    assert np.isfinite(betting.bounded(np.ones(100_000), 1e-9)).all()
    assert np.isfinite(betting.bounded(np.zeros(100_000), 0.5)).all()
    assert betting.bounded([], 0.5).shape == betting.bernoulli([], 0.5).shape == (0,)
    assert betting.first_over(betting.bounded([], 0.5), 1e-6) is None
    assert betting.first_over(np.array([0.0, 2.0, 5.0]), math.exp(-2)) == 2


@pytest.mark.parametrize("rate", [0.0, 1.0, -1.0, math.nan])
def test_impossible_rates_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        betting.bernoulli([True], rate)


def test_impossible_bets_and_weights_are_refused() -> None:
    for bet in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="bet"):
            betting.bounded([bet], 0.5)
    for mu0 in (0.0, math.nan):
        with pytest.raises(ValueError, match="mu0"):
            betting.bounded([0.5], mu0)
    one = np.zeros(3)
    for running, weights in (
        ([one], [1.0, 0.0]),
        ([], []),
        ([one], [1.5]),
        ([one], [-0.5]),
        ([one, one[:2]], [0.5] * 2),
    ):
        with pytest.raises(ValueError, match=r"weights|lengths"):
            betting.average(running, weights)


def test_evidence_is_read_from_the_metrics_of_checks() -> None:
    judged = {"exceeds": 1, "n_least": 24, "groups": 12, "score": 0.3}
    running = betting.of_check([{}, judged, {"tokens": 3}, judged])
    expected = betting.calibrated([True, True], 24, 12)
    assert running == pytest.approx([0.0, expected[0], expected[0], expected[1]])
    assert betting.of_check([]).shape == (0,)
    assert betting.of_check([{}, {}]).tolist() == [0.0, 0.0]
