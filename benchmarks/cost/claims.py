"""What the worker arm answered and claimed, kept as evidence so that a later run replays the same ids."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies import codec
from policies.evidence import PAD_ID, Evidence, Ids, Logprobs, Sampling

FILE = "claims.bin"
_LENGTH = struct.Struct("<I")


class Claims:
    """Evidence by name, in one file of packed records; a record that a killed run left half written is dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._packed: dict[str, bytes] = {}
        data = path.read_bytes() if path.exists() else b""
        at = 0
        while at + _LENGTH.size <= len(data):
            end = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
            if end > len(data):
                break
            packed = data[at + _LENGTH.size : end]
            self._packed[codec.unpack(packed)[0].id] = packed
            at = end
        if at != len(data):
            os.truncate(path, at)

    def __contains__(self, name: str) -> bool:
        return name in self._packed

    def __getitem__(self, name: str) -> Evidence:
        return codec.unpack(self._packed[name])[0]

    def add(self, evidence: Evidence) -> None:
        """Keep one answer under its id; the first one of a name stays."""
        if evidence.id in self._packed:
            return
        packed = codec.pack([evidence])
        self._packed[evidence.id] = packed
        with self._path.open("ab") as file:
            file.write(_LENGTH.pack(len(packed)) + packed)


def grid_name(cell: tuple[int, int]) -> str:
    """Names the answer of a cell of the grid."""
    return f"grid-{cell[0]}-{cell[1]}"


def load_name(load: str, index: int) -> str:
    """Names one answer of a load."""
    return f"load-{load}-{index}"


def claim_arrays(entries: Sequence[Mapping[int, Any]], output_ids: Ids, top_k: int) -> tuple[Ids, Logprobs]:
    """vLLM's logprobs (one dict of id to `Logprob` per token) as the tap would store them.

    Returns:
        int32 and float32 (G, top_k + 1): the sampled token first, then the others by descending logprob; −1 and −inf
        pad.
    """
    ids: NDArray[np.int32] = np.full((len(entries), top_k + 1), PAD_ID, np.int32)
    logprobs: NDArray[np.float32] = np.full(ids.shape, -np.inf, np.float32)
    for row, (named, sampled) in enumerate(zip(entries, output_ids.tolist(), strict=True)):
        others = sorted(((one.logprob, id) for id, one in named.items() if id != sampled), reverse=True)[:top_k]
        ids[row, 0], logprobs[row, 0] = sampled, named[sampled].logprob
        ids[row, 1 : 1 + len(others)] = [id for _, id in others]
        logprobs[row, 1 : 1 + len(others)] = [logprob for logprob, _ in others]
    return ids, logprobs


def made_up(prompt_ids: Ids, output_len: int, top_k: int, vocab_size: int, name: str) -> Evidence:
    """An answer nobody gave, for replays without a worker (`--skip-worker`): random ids, flat logprobs."""
    rng = np.random.default_rng([len(prompt_ids), output_len])
    ids = rng.integers(0, vocab_size, (output_len, top_k + 1), dtype=np.int32)
    return Evidence(
        id=name,
        endpoint="completions",
        backend="",
        model="",
        sampling=Sampling(temperature=0.0),
        prompt_ids=prompt_ids,
        output_ids=np.ascontiguousarray(ids[:, 0]),
        claim_ids=ids,
        claim_logprobs=np.full(ids.shape, -np.log(vocab_size), np.float32),
        faults=("made_up",),
    )
