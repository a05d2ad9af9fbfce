"""Evidence without any two client keys."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import _corroboration, eprocess
from policies.record import Heard
from policies.unit import REPLAYED

RATE = 1e-3
MU0 = 0.05
NOTHING = -math.inf


def heard(n: int, key: str, x: float, operator: bool = False) -> Heard:
    return Heard(n, key, operator, {"distance": (x, MU0), "margin": (0.0, MU0)})


def plainly(units: list[Heard], left_out: tuple[str, ...]) -> float:
    """The evidence with some keys' units silent, one unit after the other."""
    log_m = eprocess.start()
    for unit in units:
        outcomes = {} if unit.key in left_out else unit.outcomes
        log_m = eprocess.advance(log_m, eprocess.steps(*eprocess.null_means(outcomes, RATE)), unit.n)
    return float(eprocess.log_evidence(log_m, REPLAYED))


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=25))
def test_it_is_the_least_over_all_pairs_of_keys(drawn: list[tuple[int, bool]]) -> None:
    units = [heard(n, f"k{key}", float(bad)) for n, (key, bad) in enumerate(drawn, 1)]
    found = _corroboration.log_evidence(units, NOTHING, RATE)
    failing = {unit.key for unit in units if unit.outcomes["distance"][0]}
    if len(failing) < 3:
        assert found == NOTHING
        return
    keys = {unit.key for unit in units}
    assert found == pytest.approx(min(plainly(units, pair) for pair in combinations(keys, 2)) - math.log(2))


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=40), st.floats(-5, 20))
def test_the_search_may_end_early_but_finds_the_same_side(drawn: list[tuple[int, bool]], enough: float) -> None:
    units = [heard(n, f"k{key}", float(bad)) for n, (key, bad) in enumerate(drawn, 1)]
    whole = _corroboration.log_evidence(units, NOTHING, RATE)
    assert (_corroboration.log_evidence(units, NOTHING, RATE, enough) >= enough) == (whole >= enough)


def test_the_operators_units_speak_alone() -> None:
    units = [heard(n, f"k{n % 2}", 1.0, operator=n % 2 == 0) for n in range(1, 21)]
    assert _corroboration.log_evidence(units, NOTHING, RATE) == pytest.approx(plainly(units, ("k1",)) - math.log(2))
    assert _corroboration.log_evidence(units, NOTHING, RATE) > math.log(1e6)


def test_exact_evidence_counts_with_it() -> None:
    assert _corroboration.log_evidence([], 3.0, RATE) == 3.0
    assert _corroboration.log_evidence([heard(1, "a", 1.0)], 3.0, RATE) == 3.0
    units = [heard(n, f"k{n}", 1.0) for n in range(1, 12)]
    alone = _corroboration.log_evidence(units, NOTHING, RATE)
    assert _corroboration.log_evidence(units, 3.0, RATE) == pytest.approx(np.logaddexp(alone, 3.0))


def test_many_keys_are_answered_in_time_and_only_failing_ones_count() -> None:
    random = np.random.default_rng(0)
    units = [heard(n, f"k{n % 200}", float(random.random() < 0.5)) for n in range(1, 257)]
    found = _corroboration.log_evidence(units, NOTHING, RATE)
    assert found > math.log(1e6)
    assert _corroboration.speakers(units) <= 200


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(17, 40))
def test_no_pair_of_many_keys_with_nulls_of_their_own_is_overlooked(seed: int, keys: int) -> None:
    """Keys that fail often under lenient nulls must not hide two that fail under strict ones."""
    random = np.random.default_rng(seed)
    strictness = random.choice([0.02, 0.05, 0.2, 0.5], keys)
    units = []
    for n in range(1, 161):
        key = int(random.integers(keys))
        x = float(random.random() < max(strictness[key], 0.3))
        units.append(Heard(n, f"k{key}", False, {"distance": (x, float(strictness[key]))}))
    everybody = sorted({unit.key for unit in units})
    expected = min(plainly(units, pair) for pair in combinations(everybody[:12], 2))
    found = _corroboration.log_evidence(units, NOTHING, RATE)
    assert found <= expected - math.log(2) + 1e-9
    strict = sorted(everybody, key=lambda key: strictness[int(key[1:])])[:4]
    assert found <= min(plainly(units, pair) for pair in combinations(strict, 2)) - math.log(2) + 1e-9
