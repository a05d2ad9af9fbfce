"""`countersign bench report DIR`: makes every table and figure again from the rows that are there.

DIR is a folder of results, or one that holds such folders. Nothing is measured, and the same rows give the same files.

exit code 0: all of them are written     1: no results there, or a file is damaged     2: wrong usage
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.metadata import FILE
from policies.errors import CountersignError

REPORTS = {
    "attack": "benchmarks.adversary.report",
    "cost": "benchmarks.cost.report",
    "detection": "benchmarks.detection.report",
    "overhead": "benchmarks.overhead.report",
    "relay": "benchmarks.overhead.relay.report",
    "standing": "benchmarks.standing.report",
}
"""By benchmark, the module whose `remake(folder, plots)` writes its report."""


def main(argv: Sequence[str]) -> int:
    """Write the reports. Raises CountersignError."""
    parser = argparse.ArgumentParser(
        prog="countersign bench report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--no-plots", action="store_true", help="tables only; needs no matplotlib")
    arguments = parser.parse_args(list(argv))
    found = results(arguments.folder)
    if not found:
        raise CountersignError(f"bench report: {arguments.folder} holds no results of a benchmark")
    for folder, benchmark in found:
        try:
            importlib.import_module(REPORTS[benchmark]).remake(folder, plots=not arguments.no_plots)
        except OSError as error:
            raise CountersignError(f"bench report: {error.filename}: {error.strerror}") from error
        print(f"{benchmark}: {folder}", file=sys.stderr)
    return 0


def results(folder: Path) -> list[tuple[Path, str]]:
    """Folders of results at or below this one, and the benchmark of each. Raises CountersignError for a damaged one."""
    found = []
    for path in sorted(folder.rglob(FILE)):
        try:
            benchmark = json.loads(path.read_text(encoding="utf-8"))["benchmark"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CountersignError(f"{path} is damaged, or says of no benchmark") from error
        if benchmark in REPORTS:
            found.append((path.parent, str(benchmark)))
    return found
