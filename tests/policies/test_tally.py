"""Names of counters from verifications, and back."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from policies import tally

CHECK = {"name": "distance", "result": "inconclusive", "reason": "too_short: 5 tokens, 16 are needed"}
DONE = {"verdict": "inconclusive", "audited": True, "reasons": [CHECK["reason"]], "checks": [CHECK]}


def counted(verification: dict[str, Any]) -> tally.Names:
    return tally.read((name, 1) for name in tally.fields(verification))


def test_a_verdict_is_counted_by_word_check_and_reason() -> None:
    assert tally.fields(DONE) == [
        "verdict|inconclusive",
        "audited",
        "reason|inconclusive|too_short",
        "check|distance|inconclusive|too_short",
    ]
    assert counted(DONE) == tally.Names(
        {("inconclusive",): 1},
        1,
        {("inconclusive", "too_short"): 1},
        {("distance", "inconclusive", "too_short"): 1},
        {"served": 0, "decided": 0},
    )


def test_two_reasons_of_one_code_count_once() -> None:
    assert tally.fields({"verdict": "reject", "reasons": ["edited: a", "edited: b", "padded"]}) == [
        "verdict|reject",
        "reason|reject|edited",
        "reason|reject|padded",
    ]


TEXT = st.text(max_size=60)


@given(TEXT, st.lists(TEXT, max_size=4), TEXT, TEXT, TEXT)
def test_nothing_odd_gets_into_a_name(word: str, reasons: list[str], name: str, result: str, reason: str) -> None:
    """Whatever is said, a name has parts of lower-case letters, digits and underscores, or is `other`."""
    said = {
        "verdict": word,
        "reasons": reasons,
        "checks": [{"name": name, "result": result, "reason": reason}],
        "audited": True,
    }
    for field in tally.fields(said):
        assert set(field) <= set("abcdefghijklmnopqrstuvwxyz0123456789_|")
        assert len(field) < 200
    found = counted(said)
    assert sum(found.verdicts.values()) == sum(found.checks.values()) == found.audited == 1


@given(st.lists(st.tuples(TEXT, st.integers(0, 10))))
def test_whatever_stands_in_redis_is_read_or_left_out(counters: list[tuple[str, int]]) -> None:
    found = tally.read(counters)
    assert all(len(parts) == 1 for parts in found.verdicts)
    assert all(len(parts) == 3 for parts in found.checks)
