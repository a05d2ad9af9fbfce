"""Plain text for a terminal of a given width: wrapped lines, tables and a chart.

Pure, but for `print_lines`; nothing is ever raised.

Text from outside is shown by `plain`, so that nothing in it moves the cursor, colours or reorders what stands around
it. A column is one cell of the terminal: wide characters take two, combining ones none.
"""

from __future__ import annotations

import math
import os
import sys
import unicodedata
from collections.abc import Sequence

from policies.seen import can_be_seen

NARROWEST = 24
"""Columns below which there is no room for a chart."""
HEIGHT = 9
"""Rows of a chart, without its axis."""

_ASCII = str.maketrans({"•": "*", "┄": "-", "┤": "|", "│": "|", "└": "+", "─": "-", "…": "~"})
_GUTTER = 2
_LEAST = 16
_LEAST_NEEDED = 1e-6
"""Threshold under which there is nothing to draw on a scale."""
_LARGEST = 999_999.0


def plain(text: object) -> str:
    """Text of unknown origin on one line: what cannot be seen is spelt out, such as \\x1b or \\u202e."""
    return "".join(char if can_be_seen(char) else _spelt(char) for char in str(text))


def encodable(text: str, encoding: str | None) -> str:
    """Text that a stream of this encoding takes: lines and dots fall back to ASCII, anything else is spelt out."""
    try:
        text.encode(encoding or "ascii")
        return text
    except (UnicodeEncodeError, LookupError):
        return text.translate(_ASCII).encode("ascii", "backslashreplace").decode()


def columns(text: str) -> int:
    """Columns that printable text takes."""
    return sum(_columns(char) for char in text)


def fit(text: str, width: int) -> str:
    """Text cut to `width` columns, with an ellipsis where something is missing."""
    if columns(text) <= width:
        return text
    return _head(text, width - 1) + "…" if width > 0 else ""


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Words on lines of at most `width` columns, all but the first behind `indent`; longer words are broken."""
    width = max(width, 2)
    indent = indent if columns(indent) < width - 1 else ""
    lines, line = [], ""
    for word in text.split():
        joined = f"{line} {word}" if line.strip() else line + word
        if columns(joined) <= width:
            line = joined
            continue
        if line.strip():
            lines.append(line)
            line = indent
        while columns(line + word) > width:
            head = _head(word, width - columns(line))
            lines.append(line + head)
            line, word = indent, word[len(head) :]
        line += word
    return [*lines, line] if line.strip() else lines or [""]


def table(
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    right: Sequence[int] = (),
    spare: Sequence[int] = (),
    indent: str = "  ",
) -> list[str]:
    """Rows, the first of them headings, as aligned columns; the last column is cut to what `width` leaves.

    Where the last would get too little, columns are left out: those that are `spare`, in that order, then from the
    right, but never the first.

    Args:
        rows: of equal length, printable.
        right: columns aligned to the right.
    """
    if not rows:
        return []
    shown = list(range(len(rows[0])))
    leave = [*spare, *(at for at in reversed(shown) if at not in spare and at)]
    while True:
        taken = [max(columns(row[at]) for row in rows) for at in shown]
        before = columns(indent) + sum(taken[:-1]) + _GUTTER * (len(shown) - 1)
        if before + min(taken[-1], _LEAST) <= width or len(shown) == 1:
            break
        shown.remove(leave.pop(0))
    taken[-1] = max(min(taken[-1], width - before), 0)
    return [fit(indent, width) + _row([row[at] for at in shown], taken, [at in right for at in shown]) for row in rows]


def _row(cells: Sequence[str], taken: Sequence[int], right: Sequence[bool]) -> str:
    padded = []
    for text, width, rightwards in zip(cells, taken, right, strict=True):
        cell = fit(text, width)
        space = " " * (width - columns(cell))
        padded.append(space + cell if rightwards else cell + space)
    return (" " * _GUTTER).join(padded).rstrip()


def number(log10: float | None) -> str:
    """10^`log10` for people: 0, 0.031, 1, 250,000, 1e6, 3.2e304, at most 1e999999; nothing (None, no number) is 0."""
    if log10 is None or math.isnan(log10) or log10 == -math.inf:
        return "0"
    if log10 == math.inf:
        return "inf"
    if -3 <= log10 < 5.9999:
        value = 10**log10
        return f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"
    log10 = min(max(log10, -_LARGEST), _LARGEST)
    exponent = math.floor(log10 + 1e-9)
    digits = f"{10 ** (log10 - exponent):.1f}"
    if digits == "10.0":
        digits, exponent = "1.0", exponent + 1
    return f"{digits.removesuffix('.0')}e{exponent}"


def chart(points: Sequence[Sequence[float | None]], needed: float, width: int) -> list[str]:
    """Evidence over units as a chart of `HEIGHT` rows and an axis; every line at most `width` columns.

    A dot is the highest evidence of the units in its column. It stands on or above the line at `needed` exactly where
    it reaches it. What lies more than `needed` over the line, or as much under 1, stands at the edge.

    Args:
        points: (unit, log10 of the evidence); no or infinitely little evidence has no dot.
        needed: log10 of the threshold, above 0.
        width: below `NARROWEST`, or without any point, there is no chart: an empty list.
    """
    known = sorted(filter(None, map(_known, points)))
    if width < NARROWEST or not known or not 0 < needed < math.inf:
        return []
    needed = max(needed, _LEAST_NEEDED)
    lowest, highest = min(value for _, value in known), max(value for _, value in known)
    bottom, top = min(0.0, max(lowest, -needed)), max(needed, min(highest, 2 * needed))
    scale = (HEIGHT - 1) / (top - bottom)
    line, one = round((needed - bottom) * scale), round(-bottom * scale)
    lower, upper = "<" * (lowest < bottom), ">" * (highest > top)
    labels = {one: "1", 0: lower + number(bottom), HEIGHT - 1: upper + number(top), line: number(needed)}
    margin = max(map(len, labels.values()))
    rows = [[" "] * (width - margin - 2) for _ in range(HEIGHT)]
    rows[line] = ["┄"] * len(rows[line])
    for at, value in enumerate(_sampled(known, len(rows[line]))):
        if value is not None:
            row = round((min(max(value, bottom), top) - bottom) * scale)
            rows[max(row, line) if value >= needed else min(row, line - 1)][at] = "•"
    drawn = [
        f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}{''.join(rows[row])}".rstrip()
        for row in range(HEIGHT - 1, -1, -1)
    ]
    return [*drawn, f"{'':{margin}} └{'─' * len(rows[line])}", _axis(known, margin + 2, width)]


def _axis(known: Sequence[tuple[float, float]], margin: int, width: int) -> str:
    first, last = f"unit {known[0][0]:,.0f}", f"{known[-1][0]:,.0f}"
    space = width - margin - len(first) - len(last)
    return fit(" " * margin + (first + " " * space + last if space > 0 else first), width)


def _sampled(known: Sequence[tuple[float, float]], count: int) -> list[float | None]:
    """Per column the highest value among its units; a column without any has none, unless it lies between two."""
    first, last = known[0][0], known[-1][0]
    found: list[float | None] = [None] * count
    for unit, value in known:
        at = round((unit - first) / (last - first) * (count - 1)) if last > first else 0
        before = found[at]
        found[at] = value if before is None else max(before, value)
    for at in range(1, count if last > first else 0):
        if found[at] is None:
            found[at] = found[at - 1]
    return found


def _known(point: Sequence[float | None]) -> tuple[float, float] | None:
    unit, value = point
    if unit is None or value is None or not math.isfinite(unit) or not value > -math.inf:
        return None
    return float(unit), float(value)


def _columns(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _head(text: str, width: int) -> str:
    """As many characters as fit in `width` columns."""
    taken = 0
    for at, char in enumerate(text):
        taken += _columns(char)
        if taken > width:
            return text[:at]
    return text


def _spelt(char: str) -> str:
    return char.encode("unicode_escape", "backslashreplace").decode("ascii")


def print_lines(lines: Sequence[str]) -> None:
    """Print what can be encoded of the lines; whoever stops reading has seen enough."""
    if not lines:
        return
    try:
        print(encodable("\n".join(lines), sys.stdout.encoding), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
