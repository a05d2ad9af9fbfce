"""Text for a terminal: the right width whatever is shown, nothing raised, nothing printed raw."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from verifier_pool import terminal

WIDTHS = st.integers(0, 140)
VALUES = st.one_of(st.none(), st.floats(), st.floats(-20, 20))
POINTS = st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 5000), st.floats()), VALUES), max_size=60)
NEEDED = st.one_of(st.floats(0.5, 12), st.floats())
PRINTABLE = st.text().map(terminal.plain)


def dots(lines: list[str]) -> list[tuple[int, int]]:
    """(row from the top, column) of every dot."""
    return [(row, at) for row, line in enumerate(lines) for at, char in enumerate(line) if char == "•"]


def line_of(lines: list[str]) -> int:
    """Row of the threshold: dashed wherever no dot stands on it."""
    (row,) = [row for row, line in enumerate(lines) if "┄" in line] or [-1]
    return row


@settings(deadline=None)
@given(POINTS, NEEDED, WIDTHS)
def test_a_chart_never_raises_and_keeps_its_width(
    points: list[tuple[float | None, float | None]], needed: float, width: int
) -> None:
    lines = terminal.chart(points, needed, width)
    assert all(terminal.columns(line) <= width for line in lines)
    assert len(lines) in (0, terminal.HEIGHT + 2)


@settings(deadline=None)
@given(st.lists(st.floats(-30, 400), min_size=1, max_size=300), st.floats(0.5, 12), st.integers(24, 140))
def test_a_chart_reaches_the_line_where_the_evidence_does(values: list[float], needed: float, width: int) -> None:
    lines = terminal.chart([*enumerate(values, 1)], needed, width)
    last = max(at for _, at in dots(lines))
    assert last < width
    over = [row for row, _ in dots(lines) if row <= line_of(lines)] if line_of(lines) >= 0 else [0]
    assert bool(over) == (max(values) >= needed)
    assert terminal.number(needed) in "\n".join(lines)


def test_charts_of_nothing_of_much_and_of_thousands() -> None:
    assert terminal.chart([], 6, 100) == []
    assert terminal.chart([(1, -math.inf), (2, None), (3, math.nan)], 6, 100) == []
    assert terminal.chart([(1, 0.0)], 6, terminal.NARROWEST - 1) == []
    (late,) = {at for _, at in dots(terminal.chart([(1, -math.inf), (2, 0.3)], 6, 40))}
    assert late == len("1e6 ┤")

    far = terminal.chart([(1, 0.0), (2, 304.0)], 6, 60)
    assert far[0].startswith(">1e12 ┤")
    assert "•" in far[0]
    assert terminal.chart([(1, 0.0), (2, math.inf)], 6, 60) == far

    thousands = terminal.chart([(unit, -1.0 if unit < 9000 else 7.0) for unit in range(1, 10_001)], 6, 100)
    assert max(map(len, thousands)) == 100
    assert thousands[-1].split() == ["unit", "1", "10,000"]
    lowest, highest = max(row for row, _ in dots(thousands)), min(row for row, _ in dots(thousands))
    assert (lowest, highest) == (terminal.HEIGHT - 1, 0)
    share = sum(row == highest for row, _ in dots(thousands)) / len(dots(thousands))
    assert 0.08 < share < 0.13


def test_one_high_unit_among_thousands_is_seen() -> None:
    points = [(unit, 6.5 if unit == 4321 else 0.0) for unit in range(1, 10_001)]
    assert [row for row, _ in dots(terminal.chart(points, 6, 80))].count(0) == 1


@settings(deadline=None)
@given(st.floats())
def test_numbers_say_the_power_they_are_given(log10: float) -> None:
    shown = terminal.number(log10)
    assert len(shown) <= 25
    if -300 < log10 < 300:
        assert math.isclose(math.log10(float(shown.replace(",", ""))), log10, abs_tol=0.025)
    if math.isinf(log10):
        assert shown == ("0" if log10 < 0 else "inf")


@settings(deadline=None)
@given(st.text(), st.integers(0, 60))
def test_nothing_is_shown_raw_or_too_wide(text: str, width: int) -> None:
    shown = terminal.plain(text)
    assert shown.isprintable()
    assert terminal.columns(terminal.fit(shown, width)) <= width
    for encoding in ("ascii", "latin-1", "utf-8", "no such", None):
        safe = terminal.encodable(shown + "•…", encoding)
        assert safe.encode("utf-8" if encoding == "utf-8" else "latin-1" if encoding == "latin-1" else "ascii")
    assert all(terminal.columns(line) <= max(width, 2) for line in terminal.wrap(shown, width, "   "))


@settings(deadline=None)
@given(st.text())
def test_wrapping_loses_nothing(text: str) -> None:
    shown = terminal.plain(text)
    assert "".join("".join(terminal.wrap(shown, 30, "  ")).split()) == "".join(shown.split())


def test_hostile_names_are_spelt_out() -> None:
    assert terminal.plain("a\x1b[2Jb\r\n\x07\u202e\ud800") == "a\\x1b[2Jb\\r\\n\\x07\\u202e\\ud800"
    assert terminal.plain("Prüfung 模型") == "Prüfung 模型"
    assert terminal.columns("模型") == 4
    assert terminal.fit("模型模型", 5) == "模型…"


@settings(deadline=None)
@given(
    st.lists(st.tuples(PRINTABLE, PRINTABLE, PRINTABLE), min_size=1, max_size=5),
    st.integers(0, 120),
    st.lists(st.sampled_from([1, 2]), unique=True),
)
def test_tables_keep_their_width(rows: list[tuple[str, str, str]], width: int, spare: list[int]) -> None:
    lines = terminal.table(rows, width, right=(1,), spare=spare)
    assert len(lines) == len(rows)
    assert all(terminal.columns(line) <= width for line in lines)


def test_a_table_leaves_out_what_does_not_fit() -> None:
    rows = [("name", "count", "reason"), ("a", "12", "words and more words and more words")]
    assert terminal.table(rows, 31, right=(1,)) == ["  name  count  reason", "  a        12  words and more …"]
    assert terminal.table(rows, 24, right=(1,)) == ["  name  count", "  a        12"]
    assert terminal.table(rows, 24, right=(1,), spare=(1,)) == ["  name  reason", "  a     words and more …"]
