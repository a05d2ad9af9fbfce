"""`metadata.json`: what the rows of a folder were measured with, one entry per run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import machine
from benchmarks.harness.rows import unplaced
from policies.errors import CountersignError

FILE = "metadata.json"


class Metadata:
    """Adds one run to the file.

    Args:
        what: what must be the same in all runs of a folder, since their rows are read together.
        arguments: the options of this run.
        began: when it began.
        load: load average before it began.

    Raises:
        CountersignError: the folder holds rows of another benchmark, or measured with something else.
    """

    def __init__(
        self,
        path: Path,
        benchmark: str,
        what: Mapping[str, Any],
        arguments: Mapping[str, Any],
        *,
        began: str,
        load: float | None = None,
    ) -> None:
        self._path = path
        known: dict[str, Any] = {"benchmark": benchmark, "runs": []}
        if path.exists():
            known = read(path)
        if known.get("benchmark", benchmark) != benchmark:
            raise CountersignError(f"{path.parent} holds rows of another benchmark, {known['benchmark']}")
        before = known.get("what", what)
        if before != what:
            differ = sorted(key for key in {*what, *before} if before.get(key) != what.get(key))
            raise CountersignError(
                f"{path.parent} holds rows measured with another {' and '.join(differ)}; give another folder, or "
                "--no-resume to begin anew"
            )
        self._run: dict[str, Any] = {
            "began": began,
            "arguments": unplaced(dict(arguments)),
            "machine": machine.describe() | {"gpu": machine.gpu()},
            "engine_packages": machine.versions(machine.ENGINE_PACKAGES),
        }
        if load is not None:
            self._run |= {"load_before": round(load, 2), "busy": machine.is_busy(load)}
        known["what"] = dict(what)
        known["runs"].append(self._run)
        self._known = known
        self._write()

    def note(self, **facts: Any) -> None:
        """What became known of this run."""
        self._run |= facts
        self._write()

    def end(self, seconds: float) -> None:
        """The run is over."""
        self.note(seconds=round(seconds, 1))

    def _write(self) -> None:
        # Renamed into place: a killed run leaves the whole file, old or new.
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._known, indent=1) + "\n")
        part.replace(self._path)


def read(path: Path) -> dict[str, Any]:
    """What the file says. Raises CountersignError for a damaged one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("runs"), list):
        raise CountersignError(f"{path} is damaged")
    return found


def busy(metadata: Mapping[str, Any], advice: str = "Do not quote these figures.") -> str:
    """The mark of a result whose machine was busy before one of its runs, and what follows; empty otherwise."""
    loads = [run["load_before"] for run in metadata["runs"] if run.get("busy")]
    if not loads:
        return ""
    return f"**Busy machine**: load {max(loads):.2f} before the start. {advice}"
