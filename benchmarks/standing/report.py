"""Tables made of simulated rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.markdown import markdown
from benchmarks.standing import fleet
from benchmarks.standing.honest import kept

METADATA = "metadata.json"
SUMMARY = "summary.md"
HONEST, CHEATS, RIVALS = "honest.jsonl", "cheats.jsonl", "rivals.jsonl"

Row = dict[str, Any]


def remake(folder: Path, plots: bool = True) -> str:
    """Write the report of a folder's rows; returns its text. Raises OSError when there are none."""
    metadata = json.loads((folder / METADATA).read_text())
    text = summary(read(folder / HONEST), read(folder / CHEATS), read(folder / RIVALS), metadata)
    (folder / SUMMARY).write_text(text)
    return text


def read(path: Path) -> list[Row]:
    """Rows back. Raises OSError when there are none."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def summary(honest: Sequence[Row], cheats: Sequence[Row], rivals: Sequence[Row], metadata: Row) -> str:
    """Every table, as Markdown."""
    rules = metadata["standing"]
    return "\n\n".join(
        [
            "# Standing, simulated",
            f"{metadata['backends']} honest backends per scenario with up to {metadata['units']} units each; "
            f"{metadata['repetitions']} runs per cheat; seed {metadata['seed']}.",
            "## Honest backends accused, looking after every unit",
            "*total*: total evidence reached 1/α. *standing*: accused by `policies.standing`, at 2/α in a first life "
            "and corroborated (where clients collude, at most). *bound*: αM + 3√(α(1 − α)M). Evidence of arrays and "
            "of single records agreed wherever it was compared.",
            markdown(accusations(honest)),
            framed(honest),
            "## Mean of M_n + 1 − Σω, at most 1 under the null",
            markdown(capitals(honest)),
            f"## Generations from the change to quarantine, α = {rules['alpha']:g}: median (90 %)",
            f"{len(metadata['clients']['keys'])} client keys in turn, audited at the rate that standing asks for. "
            "*0, 200, 2000*: honest answers before.",
            markdown(times(cheats, "quarantined", "by standing")),
            "## The same with everything audited",
            markdown(times(cheats, "quarantined", "everything")),
            "## Generations to `suspect`, audited at the rate that standing asks for",
            markdown(times(cheats, "suspect", "by standing")),
            "## Output tokens to quarantine, audited at the rate that standing asks for",
            markdown(times(cheats, "tokens", "by standing")),
            "## Other rules on the same verdicts, everything audited: median generations after 0 / 200 / 2000 honest",
            markdown(beside(cheats)),
            "## Honest backends that the other rules accuse",
            markdown(wrongly(rivals)),
        ]
    ) + "\n"  # fmt: skip


def framed(rows: Sequence[Row]) -> str:
    """What standing itself made of some framed backends."""
    found = [row for row in rows if row.get("sampled")]
    counts = ", ".join(f"{row['sampled accused']} of {row['sampled']} at α = {row['alpha']:g}" for row in found)
    return f"Framed backends that `policies.standing` itself accused, every unit folded: {counts}."


def accusations(rows: Sequence[Row]) -> list[list[str]]:
    """One line per scenario: accusations at each α."""
    alphas = list(dict.fromkeys(row["alpha"] for row in rows))
    lines = [
        ["scenario", "what", "promised", *(f"α = {alpha:g}: total / standing / bound" for alpha in alphas), "kept"]
    ]
    for group in _groups(rows, "scenario"):
        first = group[0]
        promised = "yes" if first["promised"] else "standing" if first["promised corroborated"] else "no"
        cells = [f"{row['accused']} / {_or_dash(row['corroborated'])} / {row['bound']:g}" for row in group]
        holds = "–" if promised == "no" else "yes" if all(kept(row) for row in group) else "NO"
        lines.append([first["scenario"], first["about"], promised, *cells, holds])
    return lines


def capitals(rows: Sequence[Row]) -> list[list[str]]:
    """One line per scenario: the mean capital and its standard error, after so many units."""
    lines = [["scenario", *(f"after {n}" for n in fleet.LOOKS)]]
    for group in _groups(rows, "scenario"):
        row = group[0]
        cells = [
            f"{row[f'capital {n}']:.3g} ± {row[f'error {n}']:.2g}" if row.get(f"capital {n}") is not None else "–"
            for n in fleet.LOOKS
        ]
        lines.append([row["scenario"], *cells])
    return lines


def times(rows: Sequence[Row], what: str, audited: str) -> list[list[str]]:
    """One line per cheat: median and 90 % quantile by the honest answers before."""
    chosen = [row for row in rows if row["audited"] == audited]
    changes = list(dict.fromkeys(row["change"] for row in chosen))
    shown = what == "quarantined"
    lines = [["cheat", *map(str, changes), *(["runs quarantined"] if shown else [])]]
    for group in _groups(chosen, "cheat"):
        cells = [_time(row, what) for row in group]
        shares = " / ".join(f"{row['quarantined share']:.0%} of {row['runs']}" for row in group)
        lines.append([group[0]["cheat"], *cells, *([shares] if shown else [])])
    return lines


def beside(rows: Sequence[Row]) -> list[list[str]]:
    """One line per cheat: medians of standing and of the other rules."""
    chosen = [row for row in rows if row["audited"] == "everything"]
    names = {
        "quarantined": "standing",
        "enough": "its evidence, uncorroborated",
        "lifetime": "lifetime e-process",
        "z > 1": "z > 1",
        "sprt": "SPRT, 1e-6",
    }
    lines = [["cheat", *names.values()]]
    for group in _groups(chosen, "cheat"):
        medians = [" / ".join(_or_never(row, row[f"{name} median"]) for row in group) for name in names]
        lines.append([group[0]["cheat"], *medians])
    return lines


def wrongly(rows: Sequence[Row]) -> list[list[str]]:
    """One line per kind of honest answers."""
    lines = [["a failed answer", "share failed", "units", "z > 1", "SPRT, 1e-3", "SPRT, 1e-6"]]
    for row in rows:
        shares = [f"{row[name]:.1%}" for name in ("z > 1", "sprt 0.001", "sprt 1e-06")]
        lines.append([row["failed"], f"{row['rate']:.2%}", str(row["units"]), *shares])
    return lines


def _groups(rows: Sequence[Row], column: str) -> list[list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[column], []).append(row)
    return list(groups.values())


def _time(row: Row, what: str) -> str:
    median, high = row[f"{what} median"], row[f"{what} high"]
    if what == "tokens":
        return " ".join(["never" if median is None else str(median), "(never)" if high is None else f"({high})"])
    return f"{_or_never(row, median)} ({_or_never(row, high)})"


def _or_never(row: Row, value: int | None) -> str:
    return f"> {row['longest']}" if value is None else str(value)


def _or_dash(value: int | None) -> str:
    return "–" if value is None else str(value)
