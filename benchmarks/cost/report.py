"""Everything that is made from rows: each file of them as CSV, `latency_summary.csv`, `summary.md`, and the plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cost import summary
from benchmarks.cost.at_load import load_text
from benchmarks.cost.in_pool import pool_text
from benchmarks.cost.plan import DICTS, FLAT, IDS, PREFILL, WORKER
from benchmarks.cost.rows import GRID, LOAD, POOL, read
from benchmarks.cost.summary import Grid, Times, lengths_of, ratio, ratio_interval
from benchmarks.harness import metadata as written
from benchmarks.harness.markdown import crossed, figure, table
from benchmarks.harness.rows import Row, write_csv

NAMES = {
    WORKER: "worker: generation with logprobs, seconds",
    IDS: "`ids`: claimed ids at the output rows, seconds",
    FLAT: "`flat`: our form `full`, seconds",
    DICTS: "`dicts`: `prompt_logprobs` as objects, seconds",
    PREFILL: "`prefill`: the floor, seconds",
}
AIMS = (((128, 2048), 160.0), ((8192, 1), 0.95))
"""Cells and what worker ÷ ids should be at least."""


def write(folder: Path, *, plots: bool = True) -> tuple[str, int]:
    """Write the report of a folder's rows; returns its text and how many rows hold errors.

    Raises:
        CountersignError: a file of rows or the metadata is damaged.
    """
    rows, load, pool = (read(folder / name) for name in (GRID, LOAD, POOL))
    for name, each in ((GRID, rows), (LOAD, load), (POOL, pool)):
        if each:
            write_csv((folder / name).with_suffix(".csv"), each)
    cells = summary.grid(rows)
    summary.write_csv(folder / "latency_summary.csv", cells)
    drawn: list[str] = []
    if plots and cells:
        from benchmarks.cost.plots import draw

        drawn = draw(folder, cells, pool)
    path = folder / written.FILE
    metadata = written.read(path) if path.exists() else {"runs": []}
    text = page(cells, rows, load, pool, metadata, drawn)
    (folder / "summary.md").write_text(text)
    failed = sum(each.failed for times in cells.values() for each in times.values())
    return text, failed + sum(bool(row["error"]) for row in [*load, *pool])


def remake(folder: Path, plots: bool = True) -> tuple[str, int]:
    """For `countersign bench report`. Raises CountersignError."""
    return write(folder, plots=plots)


def page(
    cells: Grid,
    rows: Sequence[Row],
    load: Sequence[Row],
    pool: Sequence[Row],
    metadata: dict[str, Any],
    plots: Sequence[str] = (),
) -> str:
    """The text of `summary.md`."""
    parts = ["# What verification costs\n\n" + _setting(metadata)]
    if cells:
        parts.append(_aims(cells))
        parts.append(_ratios(cells))
    parts += [f"![{name}]({name}.png)" for name in plots]
    if cells:
        parts += [_times(cells, arm) for arm in NAMES]
        parts.append(_runs(cells))
    if load:
        parts.append(load_text(load))
    if pool:
        parts.append(pool_text(pool, load, cells))
    errors = [row for row in [*rows, *load, *pool] if row["error"]]
    if errors:
        parts.append(_errors(errors))
    return "\n\n".join(parts) + "\n"


def _setting(metadata: dict[str, Any]) -> str:
    what, runs = metadata.get("what", {}), metadata["runs"]
    if not runs:
        return "Nothing says what these rows were measured with."
    references = sorted({run["reference"] for run in runs if "reference" in run})
    versions = ", ".join(f"{name} {found}" for name, found in runs[-1]["engine_packages"].items())
    machine = runs[-1]["machine"]
    lines = [
        f"Model {what['model']}, engine arguments `{json.dumps(what['engine'], sort_keys=True)}`, top {what['top_k']}, "
        f"seed {what['seed']}. {versions}.",
        f"Machine: {machine.get('gpu') or 'no GPU'}; {machine['cpu']}, {machine['cores']} cores; "
        f"{len(runs)} runs from {runs[0]['began']} to {runs[-1]['began']}.",
    ]
    lines += [mark for mark in [written.busy(metadata)] if mark]
    lines += [f"Reference: {name}." for name in references]
    lines.append(
        "Worker = generation with top-k logprobs, greedy, exactly the asked length. Verifier = one replay of prompt "
        "and answer on the same engine, timed from submission to result with nothing else in flight, its arrays "
        "included; checks and judge run in other processes and are measured apart. Prefix caching is off. Cells are "
        "medians; nothing is extrapolated, and what was not measured is empty. LMCV's verifier is our arm `dicts`; its "
        "columns in `latency_summary.csv` hold that arm, ours follow."
    )
    return "\n\n".join(lines)


def _aims(cells: Grid) -> str:
    rows = []
    for cell, aim in AIMS:
        interval = ratio_interval(cells, cell, IDS)
        rows.append(
            [
                f"{cell[0]} / {cell[1]}",
                f"≥ {aim:g}",
                figure(ratio(cells, cell, IDS)),
                "" if interval is None else f"{figure(interval[0])}–{figure(interval[1])}",
                figure(ratio(cells, cell, FLAT)),
                figure(ratio(cells, cell, DICTS)),
                figure(ratio(cells, cell, PREFILL)),
                str(cells.get(cell, {}).get(WORKER, Times()).n),
            ]
        )
    return "## Worker ÷ verifier where it was promised\n\n" + table(
        ["in / out", "aim", "`ids`", "range", "`flat`", "`dicts`", "floor", "n"], rows
    )


def _ratios(cells: Grid) -> str:
    inputs, outputs = lengths_of(cells)
    parts = ["## Worker ÷ verifier\n\nOver 1: a replay is cheaper than the answer it checks."]
    for arm in (IDS, FLAT, DICTS, PREFILL):
        values = {cell: ratio(cells, cell, arm) for cell in cells}
        parts.append(f"`{arm}`\n\n" + crossed(inputs, outputs, values))
    for name, lines in summary.published().items():
        grid = {(int(x["input_len"]), int(x["output_len"])): x["worker_over_verifier_median"] for x in lines}
        parts.append(f"LMCV, {name} (their verifier is `dicts`)\n\n" + crossed(*lengths_of(grid), grid))
    return "\n\n".join(parts)


def _times(cells: Grid, arm: str) -> str:
    inputs, outputs = lengths_of(cells)
    values = {cell: times[arm].median for cell, times in cells.items() if arm in times}
    return f"### {NAMES[arm]}\n\n" + crossed(inputs, outputs, values, digits=4)


def _runs(cells: Grid) -> str:
    inputs, outputs = lengths_of(cells)
    counts: dict[tuple[int, int], float | None] = {
        cell: float(times[WORKER].n) for cell, times in cells.items() if WORKER in times
    }
    return (
        "### Runs of the worker per cell\n\n"
        + crossed(inputs, outputs, counts, digits=0)
        + f"\n\nFrom 2,048 output tokens on there is one run and no warm-up; with fewer than {summary.FEWEST} runs "
        "there is no interval. A range runs from the smallest to the largest run, which hold the true median with "
        "probability 1 − 2^(1−n)."
    )


def _errors(rows: Sequence[Row]) -> str:
    lines = [f"- {row.get('arm') or row.get('phase')} {_place(row)}: {row['error']}" for row in rows[:20]]
    more = f"\n- and {len(rows) - 20} more" if len(rows) > 20 else ""
    return "## Runs that failed\n\n" + "\n".join(lines) + more


def _place(row: Row) -> str:
    return str(row["load"]) if "load" in row else f"{row['input_len']}/{row['output_len']}"
