"""The table of an attack run, and the files it leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.adversary.score import FAULT_RATE, LEVEL, ORDERS, Summary
from benchmarks.adversary.traffic import Row

COLUMNS = (
    "attack",
    "responses",
    "verdicts",
    "single-response detection (95 %)",
    "responses to 1e-6",
    "tokens to 1e-6",
    "caught by",
    "first by",
    "as expected",
)
FOOTNOTE = (
    f"Responses and tokens to evidence 1/{LEVEL:g}: medians over {ORDERS} random orders of the responses; — where most "
    f"orders do not get there. Exact checks bet against a fault rate of {FAULT_RATE:g} per generation, calibrated ones "
    "with their profile's bound. Detected is what was rejected or withheld."
)


def cells(summary: Summary) -> tuple[str, ...]:
    """One row of the table."""
    verdicts = ", ".join(f"{count} {word}" for word, count in sorted(summary.verdicts.items()))
    share = f"{summary.detected}/{summary.judged} ({summary.low:.0%}–{summary.high:.0%})" if summary.judged else "—"
    caught = ", ".join(f"{name} {count}" for name, count in summary.caught_by.items())
    expected = "yes" if summary.ok else "NO"
    if not summary.sent:
        expected = "skipped"
    elif not summary.attack.honest and not summary.attack.caught_by:
        expected = "nothing expected"
    return (
        summary.name,
        str(summary.sent),
        verdicts or summary.note,
        share,
        _count(summary.responses),
        _count(summary.tokens),
        caught or "—",
        ", ".join(summary.first) or "—",
        expected,
    )


def markdown(summaries: Sequence[Summary]) -> str:
    """The table and what its columns mean."""
    lines = [_line(COLUMNS), "|" + "---|" * len(COLUMNS), *(_line(cells(summary)) for summary in summaries)]
    return "\n".join(lines) + f"\n\n{FOOTNOTE}"


def complaints(summaries: Sequence[Summary]) -> list[str]:
    """What is not as it should be, in sentences."""
    found = []
    for summary in (summary for summary in summaries if summary.sent and not summary.ok):
        if not summary.attack.honest:
            found.append(f"{summary.name} was not caught: the evidence of {summary.judged} responses stays under 1e-6")
        elif summary.judged:
            found.append(f"{summary.name} is honest, and {summary.detected} of {summary.judged} were held against it")
        else:
            found.append(f"{summary.name} got no verdict")
    return found


class Output:
    """The folder of one run: `rows.jsonl` grows with every attack, `summary.md` and `metadata.json` follow."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "rows.jsonl").write_text("")

    def rows(self, attack: str, rows: Sequence[Row]) -> None:
        """Add the rows of one attack."""
        if self._folder is not None:
            with (self._folder / "rows.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"attack": attack, **row}) + "\n" for row in rows)

    def finish(self, summaries: Sequence[Summary], metadata: Mapping[str, Any]) -> None:
        """Write the table and how it was made."""
        if self._folder is not None:
            (self._folder / "summary.md").write_text(markdown(summaries) + "\n", encoding="utf-8")
            (self._folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


def _line(values: Sequence[str]) -> str:
    return "| " + " | ".join(values) + " |"


def _count(value: int | None) -> str:
    return "—" if value is None else f"{value:,}"
