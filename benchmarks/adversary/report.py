"""The table of an attack run, and the files it leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.adversary.registry import ATTACKS
from benchmarks.adversary.score import FAULT_RATE, LEVEL, ORDERS, Summary, summarise, tokens_of
from benchmarks.adversary.traffic import Row
from benchmarks.harness.metadata import FILE, busy
from benchmarks.harness.rows import read, write_csv
from policies.errors import CountersignError

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


ROWS, CSV, SUMMARY, EVIDENCE = "rows.jsonl", "rows.csv", "summary.md", "evidence_paths"


def remake(folder: Path, plots: bool = True) -> str:
    """Write the report of a run's folder from its rows; returns its text. Raises CountersignError."""
    rows = read(folder / ROWS, {"attack", "verdict", "error"})
    named = {name: [row for row in rows if row["attack"] == name] for name in dict.fromkeys(r["attack"] for r in rows)}
    write_csv(folder / CSV, [line for row in rows for line in _lines(row)])
    text = _page([summarise(ATTACKS[name], mine) for name, mine in named.items()], _metadata(folder / FILE))
    (folder / SUMMARY).write_text(text, encoding="utf-8")
    if plots:
        _draw(folder, named)
    return text


def _page(summaries: Sequence[Summary], metadata: Mapping[str, Any]) -> str:
    mark = busy({"runs": [metadata]}, "Verdicts do not depend on it.")
    return (f"{mark}\n\n" if mark else "") + markdown(summaries) + "\n"


def _metadata(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CountersignError(f"{path} is damaged")
    return found


def _lines(row: Row) -> list[Row]:
    """A response as lines of CSV: one per choice, with what each check found; one also where there is no choice."""
    shared = {name: value for name, value in row.items() if name != "choices"}
    choices = [
        {
            check["name"]: {name: check[name] for name in ("result", "reason", "level")} | check["metrics"]
            for check in found["checks"]
        }
        for found in row.get("choices", ())  # a request that failed has none
    ]
    return [shared | {"choice": place} | checks for place, checks in enumerate(choices)] or [shared]


def _draw(folder: Path, named: Mapping[str, Sequence[Row]]) -> None:
    """E-values of every attack, and of all honest variants together."""
    from benchmarks.detection import curves, plots
    from benchmarks.harness import figures

    def paths(rows: Sequence[Row]) -> curves.Paths | None:
        choices = [choice for row in rows for choice in row.get("choices", ()) if choice["checks"]]
        return curves.paths_of(choices, [tokens_of(each) for each in choices], 30, 200) if choices else None

    honest = paths([row for name, mine in named.items() if ATTACKS[name].honest for row in mine])
    cheats = {name: found for name, mine in named.items() if not ATTACKS[name].honest and (found := paths(mine))}
    figures.save(folder, EVIDENCE, plots.evidence(cheats, honest))


class Output:
    """The folder of one run: `rows.jsonl` grows with every attack, `summary.md` and `metadata.json` follow."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ROWS).write_text("")

    def rows(self, attack: str, rows: Sequence[Row]) -> None:
        """Add the rows of one attack."""
        if self._folder is not None:
            with (self._folder / ROWS).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"attack": attack, **row}) + "\n" for row in rows)

    def finish(self, summaries: Sequence[Summary], metadata: Mapping[str, Any]) -> None:
        """Write the table and how it was made."""
        if self._folder is not None:
            (self._folder / SUMMARY).write_text(_page(summaries, metadata), encoding="utf-8")
            known = {"benchmark": "attack", **metadata}
            (self._folder / FILE).write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
            rows = read(self._folder / ROWS)
            write_csv(self._folder / CSV, [line for row in rows for line in _lines(row)])


def _line(values: Sequence[str]) -> str:
    return "| " + " | ".join(values) + " |"


def _count(value: int | None) -> str:
    return "—" if value is None else f"{value:,}"
