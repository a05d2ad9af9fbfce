"""Everything that is made of judged rows: the summary, its curves as CSV, and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.detection import curves, tables
from benchmarks.detection.curves import FALSE_ALARMS, LENGTH, POWERS, STATISTICS, Paths, Roc
from benchmarks.detection.judging import Row
from benchmarks.detection.rows import CSV, ROWS, broken, judged, read_rows
from benchmarks.detection.rows import write_csv as write_rows
from benchmarks.harness import machine, metadata
from benchmarks.harness.markdown import markdown, table
from benchmarks.harness.rows import write_csv

T = TypeVar("T")

SUMMARY = "summary.md"
SHOWN = (
    *("fp8", "kv-fp8", "int8", "int4", "perturbed", "hidden", "hot", "moe-fp8", "second-pass", "fp8 spoofed"),
    *("fp8 spoofed, rival omitted", "fp8 spoofed, bent", "fp8-rounded spoofed, bent", "kv-fp8 spoofed, bent"),
)
SHOWN_ERRORS = 20
POWER_CSV, ROC_CSV = "power.csv", "roc_128.csv"


def remake(folder: Path, plots: bool = True) -> tuple[str, int]:
    """Write the report of a folder; returns its text, and how many answers could not be judged.

    Raises OSError when there are no rows, CountersignError for damaged files.
    """
    every, meta = read_rows(folder / ROWS), metadata.read(folder / metadata.FILE)
    rows, failed = judged(every), broken(every)
    write_rows(folder / CSV, every)
    found = {name: curves.paths(group) for name, group in _arms(rows).items()}
    compared = compare(rows)
    honest = curves.honest(rows)
    write_csv(folder / POWER_CSV, power_rows(found))
    write_csv(folder / ROC_CSV, roc_rows(compared))
    drawn: list[str] = []
    if plots and found:
        from benchmarks.detection.plots import draw

        shown = {statistic: _shown(arms) for statistic, arms in compared.items()}
        drawn = draw(folder, _shown(found), curves.paths(honest) if honest else None, shown)
    text = summary(rows, meta, found, compared, drawn, failed)
    (folder / SUMMARY).write_text(text, encoding="utf-8")
    return text, len(failed)


def _shown(arms: Mapping[str, T]) -> dict[str, T]:
    """Those that are drawn: no more than an eye can follow. Where none of them is there, all."""
    return {name: arms[name] for name in SHOWN if name in arms} or dict(arms)


def _arms(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Arms that are no honest ones."""
    return tables.by_arm(row for row in rows if row["kind"] != "honest")


def compare(rows: Sequence[Row]) -> dict[str, dict[str, Roc]]:
    """By statistic and arm, where an arm's answers score anything by it that honest ones do not."""
    null = curves.honest(rows)
    found: dict[str, dict[str, Roc]] = {}
    for statistic in STATISTICS:
        for name, group in _arms(rows).items():
            curve = None if name.startswith("moe") else curves.roc(null, group, statistic)
            if curve is not None and curve.area > 0.55:
                found.setdefault(statistic, {})[name] = curve
    return found


def power_rows(found: Mapping[str, Paths]) -> list[dict[str, Any]]:
    """One line per arm and power."""
    return [
        {"arm": name, "power": power, "tokens": paths.needed(power)}
        for name, paths in found.items()
        for power in POWERS
    ]


def roc_rows(compared: Mapping[str, Mapping[str, Roc]]) -> list[dict[str, Any]]:
    """One line per corner of every curve."""
    return [
        {"statistic": statistic, "arm": name, "false alarms": round(alarm, 6), "caught": round(caught, 6)}
        for statistic, arms in compared.items()
        for name, curve in arms.items()
        for alarm, caught in curve.corners()
    ]


def summary(
    rows: Sequence[Row],
    meta: Mapping[str, Any],
    found: Mapping[str, Paths],
    compared: Mapping[str, Mapping[str, Roc]],
    drawn: Sequence[str] = (),
    failed: Sequence[Row] = (),
) -> str:
    """Every table, as Markdown."""
    parts = [
        "# Detection on recorded answers",
        *_head(meta, len(rows)),
        "Every answer is audited once in form `full`. The last column is the median, over random orders, of how many "
        "answers and tokens it takes until the evidence of all checks together reaches 1,000,000 (`policies.betting`).",
        "## Honest",
        markdown(tables.verdicts(rows, "honest")),
        "## A second pass of the declared model",
        markdown(tables.verdicts(rows, "twin")),
        "## Cheats",
        markdown(tables.verdicts(rows, "cheat")),
        *_power(found),
        *_roc(compared),
        *(f"![{name}]({name}.png)" for name in drawn),
        "## Deciding scores: median (smallest–largest)",
        markdown(tables.scores(rows)),
        *(
            part
            for length in tables.LENGTHS
            for part in (
                f"## Statistics at {length} tokens: d′ of one answer, and share detected at 1 % false alarms",
                markdown(tables.effects(rows, length)),
            )
        ),
        "## LMCV's rules as they stand (made for other models and other K)",
        markdown(tables.strangers(rows)),
        *_broken(failed),
    ]
    return "\n\n".join(parts) + "\n"


def _head(meta: Mapping[str, Any], judgements: int) -> list[str]:
    last = meta["runs"][-1]
    made: Mapping[str, Any] = next((run["calibration"] for run in reversed(meta["runs"]) if "calibration" in run), {})
    calibration = ", ".join(
        f"{name}: {found['answers']} answers, {found['tokens']} tokens, {found['cells']} cells"
        for name, found in made.items()
    )
    mark = metadata.busy(meta, "Judgements do not depend on it.")
    return [
        f"{meta['what']['engine']}. {judgements} judgements; profiles made of other prompts ({calibration}). Judged "
        f"{last['began']}: {machine.words(last['machine'])}.",
        *([mark] if mark else []),
    ]


def _broken(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    shown = [f"- {row['arm']}, answer {row['answer']}: {row['error']}" for row in rows[:SHOWN_ERRORS]]
    more = [f"- and {len(rows) - SHOWN_ERRORS} more"] if len(rows) > SHOWN_ERRORS else []
    return ["## Answers that could not be judged", "\n".join([*shown, *more])]


def _power(found: Mapping[str, Paths]) -> list[str]:
    if not found:
        return []
    lines = [
        [name, *("never" if (need := paths.needed(power)) is None else f"{need:,.0f}" for power in POWERS)]
        for name, paths in found.items()
    ]
    text = (
        "## Power against tokens\n\nAudited output tokens within which that share of random orders of an arm's answers "
        f"accuses it at one in a million; {curves.ORDERS} orders. An order ends with the arm's answers."
    )
    return [text, table(["arm", *(f"{power:.0%}" for power in POWERS)], lines)]


def _roc(compared: Mapping[str, Mapping[str, Roc]]) -> list[str]:
    lines = []
    for statistic, arms in compared.items():
        for name, curve in arms.items():
            low, high = curve.interval(0.01)
            shares = [f"{curve.at(alarms):.1%}" for alarms in FALSE_ALARMS]
            shares[1] += f" ({low:.1%} to {high:.1%})"
            lines.append([statistic, name, str(curve.cheats), f"{curve.area:.3f}", *shares])
    if not lines:
        return []
    honest = max(curve.honest for arms in compared.values() for curve in arms.values())
    text = (
        f"## One answer of {LENGTH} tokens: areas under ROC curves, and shares caught at so many false alarms\n\n"
        f"Against {honest} honest answers of the dense model, all conditions and temperatures together, each check's "
        "score alone. Selection's is the share of tokens that violate. Arms that a score does not tell from honest "
        "ones (area up to 0.55) are left out."
    )
    head = ["score", "arm", "answers", "area", *(f"{alarms:.1%}" for alarms in FALSE_ALARMS)]
    return [text, table(head, lines)]
