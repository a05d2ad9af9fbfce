"""The demo's `countersign.yaml`: one model, three backends that all claim to run it, and a reference of our own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.demo.models import DemoModels
from benchmarks.demo.servers import MAX_MODEL_LEN, MODEL, RUNTIME, engine

HONEST = "honest"
IMPOSTOR = "impostor"
SPOOFER = "spoofer"
BACKENDS = (HONEST, IMPOSTOR, SPOOFER)
"""In the table's order."""

REFERENCE_ENGINE: dict[str, Any] = {
    # More precise than any backend. With bf16 here, honest answers agree with their replay bit for bit on some
    # processors and drift on others, and where nothing drifts nothing can be calibrated.
    "dtype": "float32",
    "enforce_eager": True,
    # Room for one more token than a backend, because a replay generates one after the whole sequence.
    "max_model_len": MAX_MODEL_LEN + 1,
    # Other batches and other prefill chunks than the honest backend's (8 and 2048): the reference must not owe
    # its agreement to running in step with it.
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
}

CALIBRATION = {
    "--requests": "64",
    "--temperatures": "0,0.8",
    "--lengths": "48,64,96",
    "--kinds": "question,code,json,translation,logs,history,maths,creative",
    "--forms": "full",
    "--replays": "1",
}
"""What the demo measures: loads, temperatures and lengths that it will judge, and no more, to be done in minutes."""


def configuration(
    models: DemoModels, backends: Mapping[str, str], *, port: int, store: Path, profile: Path
) -> dict[str, Any]:
    """Settings as a tree. `backends` maps a name to its base URL; only the honest one is `trusted`."""
    declared = json.loads((models.bf16 / "config.json").read_text())
    model = {
        "tokenizer": str(models.bf16 / "tokenizer.json"),
        "vocab_size": declared["vocab_size"],
        "max_model_len": MAX_MODEL_LEN,
        "generation_config": json.loads((models.bf16 / "generation_config.json").read_text()),
        "eos_token_ids": [declared["eos_token_id"]],
        "profile": str(profile),
        "reference": {"kind": "vllm_engine", "path": str(models.bf16), "engine": REFERENCE_ENGINE},
    }
    return {
        "host": "127.0.0.1",
        "port": port,
        "embedded_dir": str(store),
        "models": {MODEL: model},
        "backends": [
            {
                "name": name,
                "url": url,
                "model": MODEL,
                "runtime": RUNTIME,
                "precision": "bf16",
                "engine": engine(),
                "trusted": name == HONEST,
            }
            for name, url in backends.items()
        ],
        # Every answer is replayed in full, because a replay of the claimed ids alone never makes a pass.
        "audit": {"rate": 1.0, "full": 1.0},
    }


def write(path: Path, tree: Mapping[str, Any]) -> None:
    """Write settings as YAML."""
    path.write_text(yaml.safe_dump(dict(tree), sort_keys=False))
