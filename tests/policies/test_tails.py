"""Tail probabilities against tabulated values."""

from __future__ import annotations

import math

import pytest

from policies._tails import binomial_tail, student_tail


@pytest.mark.parametrize(
    ("t", "df", "p"),
    [
        # Tables of Student's t, one-sided.
        (12.706, 1, 0.025),
        (2.776, 4, 0.025),
        (2.764, 10, 0.01),
        (2.390, 60, 0.01),
        (4.587, 10, 0.0005),
        (0.0, 5, 0.5),
        (-2.764, 10, 0.99),
        # One degree of freedom is the Cauchy law, two have a closed form.
        (1e6, 1, 0.5 - math.atan(1e6) / math.pi),
        (100.0, 2, 0.5 - 100 / (2 * math.sqrt(2 + 100**2))),
    ],
)
def test_student_tail(t: float, df: float, p: float) -> None:
    assert student_tail(t, df) == pytest.approx(p, rel=2e-3)


def test_student_tail_at_the_ends() -> None:
    assert student_tail(math.inf, 7) == 0
    assert student_tail(-math.inf, 7) == 1
    assert math.isnan(student_tail(math.nan, 7))
    tails = [student_tail(t, 11) for t in range(0, 200)]
    assert tails == sorted(tails, reverse=True)
    assert tails[-1] > 0


@pytest.mark.parametrize("n", [1, 7, 40])
@pytest.mark.parametrize("p", [1e-4, 0.2, 0.9])
def test_binomial_tail_is_the_sum_of_its_terms(n: int, p: float) -> None:
    for at_least in range(n + 2):
        exact = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(at_least, n + 1))
        assert binomial_tail(n, p, at_least) == pytest.approx(exact, rel=1e-9, abs=1e-300)


def test_binomial_tail_at_the_ends() -> None:
    assert binomial_tail(10, 0.5, 0) == 1
    assert binomial_tail(10, 0.5, 11) == 0
    assert binomial_tail(10, 0, 1) == 0
    assert binomial_tail(10, 1, 10) == 1
    assert binomial_tail(100_000, 1e-4, 5_000) == pytest.approx(0, abs=1e-300)
