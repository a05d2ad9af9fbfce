"""The page: a row a case, a column a gateway, and what failed where. Everything in it comes from the lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.fidelity.cases import CASES
from benchmarks.fidelity.gateways import ABSENT

Row = dict[str, Any]

HOLDS, BYTES, LACKS, WRONG = "holds", "other bytes", "lacking", "wrong"
WORST_FIRST = (WRONG, LACKS, BYTES)
REASON = 150
RECORDED = "test_differential.py"


def merged(old: Iterable[Row], new: list[Row]) -> list[Row]:
    """The rows of earlier runs with those of the gateways that ran again replaced; our own first."""
    ran = {row["gateway"] for row in new}
    rows = [row for row in old if row["gateway"] not in ran] + new
    order = ["Countersign", *dict.fromkeys(row["gateway"] for row in rows if row["gateway"] != "Countersign")]
    return sorted(rows, key=lambda row: order.index(row["gateway"]))


def read(path: Path) -> list[Row]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(rows: list[Row], path: Path) -> str:
    """Write `path`.md and .jsonl; returns the page."""
    page = render(rows)
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path.with_suffix(".md").write_text(page)
    return page


def render(rows: list[Row]) -> str:
    """The page of these rows."""
    runs = [row for row in rows if row["kind"] == "run"]
    tests = {run["gateway"]: _tests(rows, run["gateway"]) for run in runs}
    names = list(tests)
    lines = [
        "# Fidelity: 65 cases against three gateways" if len(names) == 3 else "# Fidelity: the 65 cases",
        "",
        "Every case was reported against some gateway of this kind; `tests/fidelity` asserts each of them, with an",
        "upstream on a raw socket that says exact bytes. A case *holds* when all of its tests pass. Otherwise the cell",
        "names the worst of what was seen, and in how many of its tests:",
        "",
        "- **other bytes**: JSON or events were spelled anew and say the same; members that are null count as absent,",
        "  `id`, `created` and `model` may be stated anew, members may be added,",
        "- **lacking**: there is no such feature, or none that can be switched on,",
        "- **wrong**: something else came than what the upstream said, or not in time, or not at all.",
        "",
        *_totals(tests),
        "",
        *_table(tests),
        "",
        "## What was seen",
        "",
        *(line for name in names for line in _seen(name, tests[name])),
        "## How it was run",
        "",
        *(line for run in runs for line in _how(run)),
        *(f"**{name}**: {why}." + "\n" for name, why in ABSENT.items()),
        "Again: `countersign bench fidelity --litellm PATH/bin/litellm --vllm-router PATH/bin/vllm-router`, each from",
        "an environment of its own. Raw outcomes, settings and commands are in `fidelity.jsonl`.",
        "",
    ]
    return "\n".join(lines)


def _tests(rows: list[Row], gateway: str) -> list[Row]:
    return [row for row in rows if row["kind"] == "test" and row["gateway"] == gateway]


def by_case(tests: list[Row]) -> dict[int, list[str]]:
    """The outcomes of each case's tests."""
    found: dict[int, list[str]] = {number: [] for number in CASES}
    for row in tests:
        for number in row["cases"]:
            found[number].append(row["outcome"])
    return found


def held(tests: list[Row]) -> tuple[int, int]:
    """Cases that hold byte for byte, and those that hold by meaning."""
    words = [set(outcomes) for outcomes in by_case(tests).values()]
    return sum(found == {HOLDS} for found in words), sum(bool(found) and found <= {HOLDS, BYTES} for found in words)


def cell(outcomes: list[str]) -> str:
    """What the table says of a case."""
    if not outcomes:
        return "not run"
    worst = next((word for word in WORST_FIRST if word in outcomes), None)
    return "holds" if worst is None else f"{worst} ({outcomes.count(worst)} of {len(outcomes)})"


def _totals(tests: dict[str, list[Row]]) -> list[str]:
    lines = ["| of 65 cases | hold byte for byte | hold by meaning | lacking | wrong |", "|---|--:|--:|--:|--:|"]
    for name, rows in tests.items():
        exact, meant = held(rows)
        worst = [next((word for word in WORST_FIRST if word in found), HOLDS) for found in by_case(rows).values()]
        lines.append(f"| {name} | {exact} | {meant} | {worst.count(LACKS)} | {worst.count(WRONG)} |")
    return lines


def _table(tests: dict[str, list[Row]]) -> list[str]:
    lines = [f"| # | asserts | {' | '.join(tests)} |", f"|--:|---|{'---|' * len(tests)}"]
    cases = {name: by_case(rows) for name, rows in tests.items()}
    lines += [
        f"| {number} | {text} | {' | '.join(cell(cases[name][number]) for name in tests)} |"
        for number, text in CASES.items()
    ]
    recorded = [cell([row["outcome"] for row in each if row["test"].startswith(RECORDED)]) for each in tests.values()]
    lines.append(f"| | held against a vLLM made of recordings | {' | '.join(recorded)} |")
    return lines


def _seen(name: str, rows: list[Row]) -> list[str]:
    failed = [row for row in rows if row["outcome"] in (WRONG, LACKS)]
    if not failed:
        return [f"**{name}**: nothing wrong, nothing lacking.", ""]
    lines = [f"**{name}**, the first test of each case that is not held by meaning:", ""]
    told: set[int] = set()
    for row in failed:
        if fresh := [number for number in row["cases"] if number not in told]:
            told.update(fresh)
            numbers = ", ".join(map(str, fresh))
            why = row.get("why", "").replace("|", "\\|").replace("`", "'")[:REASON]
            lines.append(f"- {numbers}: `{row['test'].partition('::')[2]}`: {row['outcome']}; `{why}`")
    return [*lines, ""]


def _how(run: Row) -> list[str]:
    described = run["machine"]
    commit = str(described.get("commit") or "")[:12]
    own = f", commit `{commit}`" if run["gateway"] == "Countersign" and commit else ""
    lines = [f"**{run['gateway']}** {run['version']}{own}, {run['started']}, {run['seconds']:.0f} s."]
    lines += run["remarks"]
    if run["commands"]:
        lines.append(f"`{run['commands']['plain']}`")
    if run["lacks"]:
        lines += ["", *(f"- lacks *{feature}*: {why}" for feature, why in run["lacks"].items())]
    return [*lines, ""]
