"""`countersign bench standing`: accuses simulated backends, honest ones and such as turn bad, and writes the tables.

countersign bench standing --output DIR             simulate everything; about ten minutes on one core
countersign bench standing --output DIR --tables    tables again, from the rows that are there
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.detection.rows import ROWS
from benchmarks.standing import cheating, evidence, honest, rivals
from benchmarks.standing.evidence import Answer
from benchmarks.standing.report import CHEATS, HONEST, METADATA, RIVALS, SUMMARY, read, remake
from policies.settings import AuditSettings, StandingSettings

RECORDED = Path(__file__).parents[1] / "results" / "detection"
SEED = 20261129

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate or only tabulate; returns 1 when an honest scenario breaks what standing promises, else 0."""
    parser = argparse.ArgumentParser(
        prog="countersign bench standing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of rows, metadata and tables")
    parser.add_argument("--tables", action="store_true", help="only the tables, from the rows that are there")
    parser.add_argument("--recorded", type=Path, default=RECORDED, help="folder of the detection benchmark's results")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--backends", type=int, default=honest.BACKENDS, help="honest backends per scenario")
    parser.add_argument("--units", type=int, default=honest.UNITS, help="units of each")
    parser.add_argument("--repetitions", type=int, default=cheating.REPETITIONS, help="runs per cheat")
    arguments = parser.parse_args(argv)
    output: Path = arguments.output
    if not arguments.tables:
        simulate(arguments)
    remake(output)
    rows = read(output / HONEST)
    print(f"wrote {output / SUMMARY}", flush=True)
    broken = [row["scenario"] for row in rows if not honest.kept(row)]
    if broken:
        print(f"more accusations than promised: {', '.join(dict.fromkeys(broken))}", flush=True)
    return 1 if broken else 0


def simulate(arguments: argparse.Namespace) -> None:
    """Everything, with rows and metadata written."""
    started = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - started:5.0f} s  {text}", flush=True)

    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    arms = evidence.recorded(arguments.recorded / "h200" / ROWS)
    honest_arms = honest_of(arms)
    live = [
        answers
        for folder in ("cpu", "cpu-variants")
        for answers in evidence.live(arguments.recorded / folder / "rows.jsonl")
    ]
    rows: list[Row] = []
    for number, setting in enumerate(honest.settings(honest_arms, live)):
        rows += honest.simulate(
            setting, seed=[arguments.seed, number], backends=arguments.backends, units=arguments.units
        )
        tell(f"{setting.name}: {', '.join(str(row['accused']) for row in rows[-len(honest.ALPHAS) :])} accused")
    write(output / HONEST, rows)
    write(output / RIVALS, cheating.false_accusations(honest_arms, seed=[arguments.seed, 0]))
    rules = StandingSettings()
    pasts = cheating.Pasts(arguments.seed, rules)
    found: list[Row] = []
    for number, cheat in enumerate(cheating.cheats(arms, honest.EXCLUDED)):
        seed = [arguments.seed, number + 1]
        found += cheating.simulate(cheat, pasts, seed=seed, repetitions=arguments.repetitions)
        tell(cheat.name)
    write(output / CHEATS, found)
    metadata = _metadata(arguments, rules) | {"seconds": round(time.monotonic() - started)}
    (output / METADATA).write_text(json.dumps(metadata, indent=1) + "\n")


def honest_of(arms: dict[str, tuple[str, list[Answer]]]) -> list[list[Answer]]:
    """Honest arms of one declaration."""
    return [answers for name, (kind, answers) in arms.items() if kind == "honest" and name not in honest.EXCLUDED]


def write(path: Path, rows: Sequence[Row]) -> None:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _metadata(arguments: argparse.Namespace, rules: StandingSettings) -> Row:
    return {
        "benchmark": "standing",
        "seed": arguments.seed,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "standing": rules.model_dump(),
        "audit": AuditSettings().model_dump(include={"rate", "floor"}),
        "clients": asdict(cheating.CLIENTS),
        "rivals": {"p0": rivals.P0, "p1": rivals.P1},
        "backends": arguments.backends,
        "units": arguments.units,
        "repetitions": arguments.repetitions,
    }
