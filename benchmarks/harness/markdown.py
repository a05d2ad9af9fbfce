"""Tables and figures of a report as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Lines as a Markdown table, the first being its head."""
    head, *rows = lines
    return table(head, rows)


def figure(value: float | None, digits: int | None = None) -> str:
    """A number with three significant digits, or so many decimals; nothing for nothing."""
    if value is None:
        return ""
    if digits is not None:
        return f"{value:,.{digits}f}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds."""
    return "" if seconds is None else figure(1000 * seconds)


def crossed(
    inputs: Sequence[int],
    outputs: Sequence[int],
    values: Mapping[tuple[int, int], float | None],
    digits: int | None = None,
) -> str:
    """Input lengths down, output lengths across."""
    rows = [[str(one), *(figure(values.get((one, other)), digits) for other in outputs)] for one in inputs]
    return table(["in \\ out", *map(str, outputs)], rows)
