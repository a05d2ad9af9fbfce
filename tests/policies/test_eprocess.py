"""E-processes over a life: validity under dependence and peeking, reaction after an honest past."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import eprocess
from policies.unit import EXACT, PROCESSES, REPLAYED

RATE = 1e-3
MU0 = 0.04
MEANS = np.array([RATE, RATE, RATE, MU0, MU0, MU0, 0.0024])


def evidence(x: np.ndarray, mu0: np.ndarray = MEANS) -> tuple[np.ndarray, np.ndarray]:
    """log M and log suspicion after every unit of x (…, n, 7), each (…, n)."""
    log_m = log_r = eprocess.start(x.shape[:-2])
    found, worry = [], []
    for at in range(x.shape[-2]):
        log_e = eprocess.steps(x[..., at, :], mu0)
        log_m, log_r = eprocess.advance(log_m, log_e, at + 1), eprocess.worry(log_r, log_e)
        found.append(eprocess.log_evidence(log_m))
        worry.append(eprocess.log_suspicion(log_r, at + 1))
    return np.stack(found, axis=-1), np.stack(worry, axis=-1)


def test_the_weights_of_all_moments_stay_within_the_budget() -> None:
    total = math.fsum(eprocess.weight(n) for n in range(1, 200_001))
    # What is left of the series after n is at most the integral of its terms, 1/ln n.
    assert total + (1 - eprocess.weight(1)) / (2.1097 * math.log(200_000)) <= 1
    with pytest.raises(ValueError, match="no unit 0"):
        eprocess.weight(0)


@given(
    st.lists(st.floats(1e-6, 0.9), min_size=7, max_size=7),
    st.lists(st.one_of(st.floats(0, 1), st.just(math.nan)), min_size=7, max_size=7),
)
def test_a_step_at_the_null_mean_is_fair_and_silence_changes_nothing(mu0: list[float], x: list[float]) -> None:
    """E e = 1 for an outcome of 1 with probability mu0, for every stake; more x is never less evidence."""
    ones, zeros = eprocess.steps(np.ones(7), mu0), eprocess.steps(np.zeros(7), mu0)
    means = np.array(mu0)[:, None]
    np.testing.assert_allclose(np.exp(ones) * means + np.exp(zeros) * (1 - means), 1.0, rtol=1e-9)
    given_steps = eprocess.steps(x, mu0)
    silent = np.isnan(x)
    assert (given_steps[silent] == 0).all()
    assert (given_steps[~silent] <= ones[~silent] + 1e-12).all()
    assert (given_steps[~silent] >= zeros[~silent] - 1e-12).all()


@pytest.mark.parametrize(("x", "mu0"), [(1.5, 0.1), (-0.1, 0.1), (0.5, 0.0), (0.5, -1.0)])
def test_what_is_no_outcome_or_mean_is_refused(x: float, mu0: float) -> None:
    with pytest.raises(ValueError, match="outcome"):
        eprocess.steps(np.full(7, x), np.full(7, mu0))


def test_a_mean_of_one_says_nothing() -> None:
    assert (eprocess.steps(np.ones(7), np.ones(7)) == 0).all()


def test_honest_backends_on_the_boundary_are_within_the_bound() -> None:
    """10,000 backends, 300 units each, looked at after each one. All processes fail together: full dependence."""
    random, alpha, backends = np.random.default_rng(1), 0.01, 10_000
    log_m = eprocess.start((backends,))
    highest = np.full(backends, -np.inf)
    total = 0.0
    for n in range(1, 301):
        x = (random.random((backends, 1)) < MEANS).astype(float)
        log_m = eprocess.advance(log_m, eprocess.steps(x, MEANS), n)
        highest = np.maximum(highest, eprocess.log_evidence(log_m))
        total += eprocess.weight(n)
    accused = int((highest >= -math.log(alpha)).sum())
    assert accused <= alpha * backends + 3 * math.sqrt(alpha * (1 - alpha) * backends)
    assert float(np.exp(eprocess.log_evidence(log_m)).mean()) + 1 - total < 1.3


def test_an_honest_past_is_no_licence() -> None:
    """After 5,000 honest units a cheat that always fails costs a few more units, not a few thousand."""
    cheat = np.array([1.0, 0, 0, 0, 0, np.nan, 0])
    x = np.concatenate([np.tile([0.0, 0, 0, 0, 0, np.nan, 0], (5000, 1)), np.tile(cheat, (10, 1))])
    found, worry = evidence(x)
    assert (found[:5000] < 0).all()
    assert int(np.argmax(found >= math.log(2e6))) - 4999 <= 6
    assert worry[5003] > math.log(1000)
    fresh, _ = evidence(np.tile(cheat, (10, 1)))
    assert int(np.argmax(fresh >= math.log(2e6))) + 1 <= 3


def test_parts_of_the_evidence_add_up_to_the_whole() -> None:
    random = np.random.default_rng(2)
    x = (random.random((50, 7)) < 0.2).astype(float)
    log_m = eprocess.start()
    for at, row in enumerate(x):
        log_m = eprocess.advance(log_m, eprocess.steps(row, MEANS), at + 1)
    parts = np.logaddexp(eprocess.log_evidence(log_m, EXACT), eprocess.log_evidence(log_m, REPLAYED))
    assert parts == pytest.approx(eprocess.log_evidence(log_m))


def test_before_the_first_unit_there_is_nothing() -> None:
    assert eprocess.log_evidence(eprocess.start((2,))).tolist() == [-math.inf] * 2
    assert eprocess.log_suspicion(eprocess.start((2,)), 0).tolist() == [-math.inf] * 2


def test_outcomes_find_their_null() -> None:
    x, mu0 = eprocess.null_means({"selection": (1.0, 0.0), "distance": (0.0, 0.03), "forged": (1.0, 0.0)}, 0.01)
    named = dict(zip(PROCESSES, zip(x.tolist(), mu0.tolist(), strict=True), strict=True))
    assert named["selection"] == (1.0, 0.01)
    assert named["distance"] == (0.0, 0.03)
    assert named["forged"][1] == pytest.approx(0.0024)
    assert all(math.isnan(named[name][0]) for name in ("structure", "withheld", "margin", "routing"))


def test_suspicion_passes_in_time_however_long_it_was_fed() -> None:
    bad = np.tile([0.0, 0, 0, 1.0, 0, np.nan, 0], (2000, 1))
    good = np.tile([0.0, 0, 0, 0.0, 0, np.nan, 0], (800, 1))
    _, worry = evidence(np.concatenate([bad, good]))
    assert worry[1999] > math.log(1000)
    assert worry[-1] < math.log(10)
