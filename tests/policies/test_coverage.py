"""Who kept an answer from being decided."""

from __future__ import annotations

from typing import Any

import pytest

from policies import coverage
from policies.checks import Check, Result
from policies.evidence import Evidence
from policies.verdict import combine
from policies.verification import Verification, describe, unverified


def verification(audited: bool = True, **results: tuple[str, str]) -> Verification:
    """A verification of checks given as name=(result, reason)."""
    checks = [
        Check(name, Result(result), reason, by_request=reason.split(":")[0] in ("not_replayed", "grammar"))
        for name, (result, reason) in results.items()
    ]
    evidence = Evidence("0" * 32, "chat", "b", "m", sampling())
    return describe([evidence], [verdict := combine(checks, audited=audited)], verdict, 1.0)


def sampling() -> Any:
    from policies.evidence import Sampling

    return Sampling()


PASS = ("pass", "")
CPU = {"structure": PASS, "selection": PASS}


@pytest.mark.parametrize(
    ("audited", "results", "expected"),
    [
        (False, CPU, ("", "")),
        (True, CPU | {"distance": PASS, "margin": PASS}, ("", "")),
        (True, CPU | {"distance": PASS, "margin": ("inconclusive", "ids_form: claimed ids alone")}, ("", "")),
        (True, CPU | {"distance": ("inconclusive", "borderline: 2.1"), "margin": PASS}, ("", "")),
        (True, CPU | {"distance": ("reject", "too_far: 3"), "margin": PASS}, ("", "")),
        (True, CPU | {"distance": ("inconclusive", "unreachable"), "margin": PASS}, ("unreachable", "ours")),
        (True, CPU | {"distance": ("inconclusive", "http_503"), "margin": PASS}, ("http_503", "ours")),
        (True, CPU, ("not_checked", "backend")),
        (False, {"structure": PASS, "selection": ("inconclusive", "not_replayed: x")}, ("not_replayed", "request")),
        (
            True,
            {"structure": PASS, "selection": ("inconclusive", "not_replayed: x"), "distance": PASS, "margin": PASS},
            ("", ""),
        ),
        (
            True,
            {"structure": PASS, "selection": ("inconclusive", "runtime_changed,v1: x"), "distance": PASS},
            ("runtime_changed", "backend"),
        ),
        (
            False,
            {"structure": ("inconclusive", "upstream_closed"), "selection": ("inconclusive", "no_tokens: none")},
            ("upstream_closed", "backend"),
        ),
        (False, {"structure": ("inconclusive", "client_left"), "selection": PASS}, ("client_left", "request")),
        (True, {"structure": ("withheld", "no_logprobs: none came"), "selection": PASS}, ("no_logprobs", "backend")),
        (False, {"structure": ("inconclusive", "something_new"), "selection": PASS}, ("something_new", "backend")),
    ],
)
def test_blame(audited: bool, results: dict[str, tuple[str, str]], expected: tuple[str, str]) -> None:
    assert coverage.of(verification(audited, **results)) == expected


@pytest.mark.parametrize(
    ("reason", "blame"),
    [
        ("backlog", "ours"),
        ("proxy_lost", "ours"),
        ("client_left", "request"),
        ("client_error", "request"),
        ("no_answer", "backend"),
        ("", "backend"),
    ],
)
def test_what_nobody_checked(reason: str, blame: str) -> None:
    found = coverage.of(unverified("0" * 32, reason, None, 1.0))
    assert found == (reason or "other", blame)
