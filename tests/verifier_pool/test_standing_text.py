"""A standing in words: any record can be shown, at any width."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from policies import standing
from policies.unit import PROCESSES, declaration_of
from tests.verifier_pool.test_standing_command import NOW, rules, unit
from verifier_pool import standing_text, terminal
from verifier_pool.standing_text import Shown

OUTCOMES = st.dictionaries(st.sampled_from(PROCESSES), st.sampled_from([(0.0, 0.02), (1.0, 0.02)]), max_size=7)
MORE = st.fixed_dictionaries(
    {
        "tokens": st.integers(0, 10**9),
        "undecided": st.sampled_from(["", "no_logprobs", "backlog", "client_left", "\x1b"]),
        "blame": st.sampled_from(["", "backend", "ours", "request"]),
        "outside": st.sampled_from(["", "client_seed", "else"]),
        "key": st.text(max_size=5),
        "operator": st.booleans(),
        "delta": st.floats(0, 1),
    }
)


@hypothesis_settings(deadline=None)
@given(st.lists(st.tuples(OUTCOMES, MORE), max_size=30), st.integers(1, 140), st.booleans(), st.booleans())
def test_any_record_can_be_shown(
    found: list[tuple[dict[str, tuple[float, float]], dict[str, Any]]], width: int, declared: bool, recorded: bool
) -> None:
    settings = rules("redis://unused")
    record = standing.new("a", declaration_of(settings.backend("a")), 1, NOW)
    units = [unit(settings, n, outcomes, **more) for n, (outcomes, more) in enumerate(found)]
    record = standing.fold(record, units, set(), settings.standing).record
    summary = standing.summary(record, settings.standing, settings.audit)
    shown = Shown(summary, declared, recorded, [summary], 3, 2, 1)
    lines = standing_text.page(shown, settings, width)
    lines += standing_text.line_per_backend([shown, shown], width, time.time())
    assert all(line.isprintable() and terminal.columns(line) <= max(width, 2) for line in lines)
    unheard = dataclasses.replace(shown, summary={**summary, "since": None})
    assert standing_text.line_per_backend([unheard], width, NOW)


@pytest.mark.parametrize(
    ("share", "shown"),
    [(None, "-"), (0.0, "0 %"), (0.0004, "<0.1 %"), (0.29, "29 %"), (0.9996, "99.9 %"), (1.0, "100 %"), (0.05, "5 %")],
)
def test_shares_are_cut_and_not_rounded(share: float | None, shown: str) -> None:
    assert standing_text.percent(share) == shown


@pytest.mark.parametrize("at", [None, 1e30, float("nan"), float("inf")])
def test_no_moment(at: float | None) -> None:
    assert standing_text.moment(at) == "-"
