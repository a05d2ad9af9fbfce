"""The one engine of all arms, as the options describe it."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cost import shape
from policies.errors import CountersignError
from policies.settings import ReferenceSettings


def model_folder(options: argparse.Namespace) -> str:
    """The model's folder. One that is made or fetched is always at the same place, which vLLM's caches hang on."""
    given = str(options.model)
    ours = Path(tempfile.gettempdir()) / f"countersign-shapes-{os.getuid()}"
    if given.startswith(shape.PREFIX):
        name = given.removeprefix(shape.PREFIX)
        if name not in shape.SHAPES:
            raise CountersignError(f"--model {given}: no such shape; there are {', '.join(shape.SHAPES)}")
        options.load_format = "dummy"
        return str(shape.make(ours / name, name))
    return given if Path(given).is_dir() else str(_fetched(given, ours / "hub"))


def _fetched(name: str, folder: Path) -> Path:
    """A model by the hub's name, as LMCV's `--model` takes it: from the hub's cache, or downloaded into it."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = huggingface_hub.snapshot_download(name)
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = f"neither a model folder nor a model that the hub gives ({type(error).__name__})"
        raise CountersignError(f"--model {name}: {reason}") from error
    link = folder / name.rpartition("/")[2]  # a snapshot's own folder is named by a hash
    folder.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(found)
    return link


def cells_of(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Lengths of the cells that `--max-total-tokens` leaves."""
    most = options.max_total_tokens or math.inf
    cells = itertools.product(options.input_lengths, options.output_lengths)
    return [cell for cell in cells if sum(cell) <= most]


def reference_settings(options: argparse.Namespace, model: str) -> ReferenceSettings:
    """The one engine of all arms, as `countersign.yaml` would have it."""
    cells = cells_of(options) or [(max(options.input_lengths), max(options.output_lengths))]
    at_load = [each for load in options.load for each in load.requests]
    needed = max(map(sum, [*(cells if options.arms else []), *at_load]), default=0) + 1
    if options.max_model_len and options.max_model_len < needed:
        raise CountersignError(
            f"--max-model-len {options.max_model_len}: the longest answer needs {needed}; --max-total-tokens leaves "
            "longer cells out"
        )
    engine: dict[str, Any] = {
        "dtype": options.dtype,
        "load_format": options.load_format,
        "max_model_len": options.max_model_len or max(map(sum, [*cells, *at_load])) + 1,
        "tensor_parallel_size": options.tensor_parallel_size,
        "trust_remote_code": options.trust_remote_code,
        # Nothing may be reused from an earlier run of the same cell.
        "enable_prefix_caching": False,
    }
    for name in ("quantization", "gpu_memory_utilization", "max_logprobs"):
        if (value := getattr(options, name)) is not None:
            engine[name] = value
    return ReferenceSettings(kind="vllm_engine", path=model, engine=engine | options.engine, timeout=600)
