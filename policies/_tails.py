"""Tail probabilities, so that a reject can state its level. Standard library only."""

from __future__ import annotations

import math

_TERMS = 300
_TINY = 1e-300
_CONVERGED = 1e-15


def binomial_tail(n: int, p: float, at_least: int) -> float:
    """P(X ≥ `at_least`) for X ~ Binomial(n, p), summed upwards so that tiny tails keep their digits."""
    if at_least <= 0:
        return 1.0
    if at_least > n or p <= 0:
        return 0.0
    if p >= 1:
        return 1.0
    base = math.lgamma(n + 1)
    total = 0.0
    for k in range(at_least, n + 1):
        log_term = base - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(p) + (n - k) * math.log1p(-p)
        term = math.exp(log_term)
        total += term
        if k > n * p and term < total * _CONVERGED:
            break
    return min(1.0, total)


def student_tail(t: float, df: float) -> float:
    """P(T > t) for Student's t with `df` degrees of freedom.

    For t > 0 this is ½·I_x(df/2, ½) with x = df/(df + t²), I being the regularised incomplete beta function.
    """
    if math.isnan(t):
        return math.nan
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    half = 0.5 * _incomplete_beta(df / 2, 0.5, df / (df + t * t))
    return half if t > 0 else 1.0 - half


def _incomplete_beta(a: float, b: float, x: float) -> float:
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x),
    )
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1.0 - front * _beta_fraction(b, a, 1 - x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    # Lentz's evaluation of the continued fraction (Abramowitz & Stegun 26.5.8).
    c = 1.0
    d = 1.0 / _away_from_zero(1.0 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for coefficient in (even, odd):
            d = 1.0 / _away_from_zero(1.0 + coefficient * d)
            c = _away_from_zero(1.0 + coefficient / c)
            value *= c * d
        if abs(c * d - 1.0) < _CONVERGED:
            break
    return value


def _away_from_zero(x: float) -> float:
    return x if abs(x) > _TINY else _TINY
