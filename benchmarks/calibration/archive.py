"""A folder with everything a calibration saw, so that it can be continued, and fitted again without asking.

`manifest.json` says what was asked of whom; `answers/NNNNN` is packed evidence (as the store holds it) and
`replays/NNNNN.npz` the replays of it. Each file is written whole or not at all.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calibration.errors import CalibrationError
from benchmarks.calibration.plan import Shot
from policies import codec
from policies.errors import EvidenceError
from policies.evidence import Evidence, Replay, ReplayForm

FORMAT = 1
_FORMS: tuple[ReplayForm, ...] = ("full", "ids")


class Archive:
    """Answers and replays by the index of their shot."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._answers = folder / "answers"
        self._replays = folder / "replays"
        self._manifest = folder / "manifest.json"

    def begin(self, manifest: dict[str, Any]) -> None:
        """Start, or continue what was begun with the same manifest.

        Raises:
            CalibrationError: the folder holds something else, or cannot be written.
        """
        manifest = json.loads(json.dumps({"format": FORMAT, **manifest}))
        try:
            if self._manifest.exists():
                self._same(manifest)
            elif self.folder.exists() and any(self.folder.iterdir()):
                raise CalibrationError(f"{self.folder} holds other things; name a new folder")
            self._answers.mkdir(parents=True, exist_ok=True)
            self._replays.mkdir(exist_ok=True)
            _write(self._manifest, json.dumps(manifest, indent=2).encode() + b"\n")
        except OSError as error:
            raise CalibrationError(f"{self.folder} cannot be written: {error.strerror}") from error

    def manifest(self) -> dict[str, Any]:
        """What was asked of whom. Raises CalibrationError where there is no such run."""
        try:
            manifest = json.loads(self._manifest.read_bytes())
        except (OSError, ValueError) as error:
            raise CalibrationError(f"{self.folder} holds no kept calibration") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise CalibrationError(f"{self.folder} was kept by another version")
        return manifest

    def keep_answer(self, shot: Shot, evidence: Evidence) -> None:
        """Keep one answer."""
        _write(self._answers / f"{shot.index:05}", codec.pack([evidence]))

    def answer(self, index: int) -> Evidence | None:
        """One answer, None when it is not there. Raises CalibrationError when it cannot be read."""
        path = self._answers / f"{index:05}"
        if not path.exists():
            return None
        try:
            (evidence,) = codec.unpack(path.read_bytes())
        except (OSError, EvidenceError, ValueError) as error:
            raise CalibrationError(f"{path} cannot be read: {error}") from error
        return evidence

    def keep_replays(self, index: int, replays: dict[str, Replay]) -> None:
        """Keep all replays of one answer."""
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for name, replay in replays.items():
            facts = {"form": replay.form, "reference": replay.reference, "own": replay.own}
            arrays[f"{name}/facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
            arrays[f"{name}/ids"], arrays[f"{name}/logprobs"] = replay.ids, replay.logprobs
            if replay.routed_experts is not None:
                arrays[f"{name}/experts"] = replay.routed_experts
            if replay.prompt_ids is not None:
                arrays[f"{name}/prompt"] = replay.prompt_ids
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        _write(self._replays / f"{index:05}.npz", buffer.getvalue())

    def replays(self, index: int) -> dict[str, Replay] | None:
        """The replays of one answer, None when they are not there. Raises CalibrationError when unreadable."""
        path = self._replays / f"{index:05}.npz"
        if not path.exists():
            return None
        try:
            with np.load(path, allow_pickle=False) as stored:
                names = [name.removesuffix("/facts") for name in stored.files if name.endswith("/facts")]
                return {name: _replay(stored, name) for name in names}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CalibrationError(f"{path} cannot be read: {error}") from error

    def _same(self, manifest: dict[str, Any]) -> None:
        kept = self.manifest()
        differing = [name for name in sorted(manifest.keys() | kept.keys()) if manifest.get(name) != kept.get(name)]
        if differing:
            raise CalibrationError(
                f"{self.folder} was begun otherwise ({', '.join(differing)} differ); continue with the same arguments "
                "and settings, or name a new folder"
            )


def _replay(stored: Any, name: str) -> Replay:
    facts = json.loads(bytes(stored[f"{name}/facts"]))
    if facts["form"] not in _FORMS:
        raise ValueError(f"a replay of form {facts['form']!r}")
    optional = {part: stored[f"{name}/{part}"] for part in ("experts", "prompt") if f"{name}/{part}" in stored.files}
    return Replay(
        stored[f"{name}/ids"],
        stored[f"{name}/logprobs"],
        form=facts["form"],
        prompt_ids=optional.get("prompt"),
        reference=facts["reference"],
        own=facts["own"],
        routed_experts=optional.get("experts"),
    )


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    os.replace(part, path)
