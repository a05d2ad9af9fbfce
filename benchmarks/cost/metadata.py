"""What the rows of a folder were measured with. Rows of different engines do not mix."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from benchmarks.cost import shape
from benchmarks.harness import machine, metadata
from benchmarks.harness.rows import unplaced
from policies.settings import ReferenceSettings


class Metadata(metadata.Metadata):
    """Adds one run to the file; what it says of the engine must be what earlier runs of the folder said.

    Raises:
        CountersignError: the folder holds rows of another model or engine.
    """

    def __init__(
        self,
        path: Path,
        options: argparse.Namespace,
        settings: ReferenceSettings,
        began: str,
        load: float | None = None,
    ) -> None:
        what = {
            "model": os.path.basename(os.path.normpath(str(settings.path))),
            "engine": unplaced(settings.engine),
            "top_k": options.top_k,
            "seed": options.seed,
            "runtime": options.runtime,
            "gpu": (machine.gpu() or "").rpartition(",")[0] or None,  # another driver is no other GPU
        }
        super().__init__(path, "cost", what, _shown(options, what["model"]), began=began, load=load)

    def engine(self, name: str, scores_ids: bool, seconds: float) -> None:
        """The engine runs: its name, whether it scores given ids, how long it took to start."""
        self.note(reference=name, scores_ids=scores_ids, engine_start_s=round(seconds, 1))

    def pool(self, workers: int, seconds: float) -> None:
        """The pool runs: CPU worker processes, seconds since the run began."""
        self.note(pool_workers=workers, pool_ready_s=round(seconds, 1))


def _shown(options: argparse.Namespace, model: str) -> dict[str, Any]:
    left_out = {"output_dir", "report", "dry_run"}
    shown = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(options).items()
        if key not in left_out
    }
    shown["load"] = [load.name for load in options.load]
    return shown if options.model.startswith(shape.PREFIX) else shown | {"model": model}
