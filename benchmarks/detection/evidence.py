"""Recorded arrays (see `record`) as evidence and replays.

NAME.answers.npz, for A answers of N tokens in all: `prompt` uint16 (concatenated), `prompt_tokens`,
`actual_prompt_tokens`, `tokens` int32 (A,), `temperature`, `seed`, `stopped` (A,), `ids` uint16 (N, 21) and `logprobs`
float32 (N, 21) of the claim, sampled token first, 65535 and −inf pad; `experts` uint8 (N, layers, slots) in
mixture-of-experts variants, 255 for the last token of an answer.
NAME.replay.npz: `ids`, `logprobs` (N, 21) the emitted token and the reference's own top 20; `claimed` (N, 21) the
reference's logprobs of the claimed ids; `experts`.
NAME.spoof.npz: `ids`, `logprobs` (N, 22) the emitted token and the true model's top 21, prefilled by the cheat.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.detection.record import PAD
from benchmarks.detection.variants import VARIANTS
from policies.evidence import Evidence, Replay, Sampling, Usage

MODEL = "smollm2"
PRECISION = "bf16"
REFERENCE = "recorded bf16 eager reference"
LENGTH = 128
"""Tokens every answer was limited to."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One answer: what the backend showed, what the reference computed, and the true model's own top 21."""

    evidence: Evidence
    replay: Replay | None
    spoof_ids: NDArray[np.int32] | None
    spoof_logprobs: NDArray[np.float32] | None


def load(folder: Path, name: str, *, runtime: str, engine: str = "") -> list[Answer]:
    """Every answer of a variant, in the order asked: prompt by prompt, each at every temperature.

    Raises OSError when the variant was not recorded.
    """
    with np.load(folder / f"{name}.answers.npz", allow_pickle=False) as file:
        recorded = {key: file[key] for key in file.files}
    replayed = _maybe(folder / f"{name}.replay.npz")
    spoofed = _maybe(folder / f"{name}.spoof.npz")
    prompts = np.split(_wide(recorded["prompt"]), np.cumsum(recorded["prompt_tokens"])[:-1])
    ends = np.cumsum(recorded["tokens"])
    return [
        _answer(name, index, prompt, slice(int(end - count), int(end)), recorded, replayed, spoofed, runtime, engine)
        for index, (prompt, end, count) in enumerate(zip(prompts, ends, recorded["tokens"], strict=True))
    ]


def _answer(
    name: str, index: int, prompt: NDArray[np.int32], rows: slice, recorded: dict[str, Any],
    replayed: dict[str, Any], spoofed: dict[str, Any], runtime: str, engine: str,
) -> Answer:  # fmt: skip
    ids = _wide(recorded["ids"][rows])
    output = np.ascontiguousarray(ids[:, 0])
    evidence = Evidence(
        id=f"{index:032x}",
        endpoint="completions",
        backend=name,
        model=MODEL,
        sampling=Sampling(
            temperature=float(recorded["temperature"][index]), seed=int(recorded["seed"][index]), max_tokens=LENGTH
        ),
        runtime=runtime,
        precision=PRECISION,
        engine=engine,
        speculative=name == "speculative",
        prompt_ids=prompt,
        output_ids=output,
        claim_ids=ids,
        claim_logprobs=recorded["logprobs"][rows],
        finish_reason="stop" if recorded["stopped"][index] else "length",
        usage=Usage(len(prompt), len(output), len(prompt), len(output)),
        routed_experts=_experts(recorded, rows, len(prompt)),
    )
    return Answer(
        evidence,
        _replay(ids, rows, recorded, replayed, len(prompt)) if replayed else None,
        _wide(spoofed["ids"][rows]) if spoofed else None,
        spoofed["logprobs"][rows] if spoofed else None,
    )


def _replay(
    claimed_ids: NDArray[np.int32], rows: slice, recorded: dict[str, Any], replayed: dict[str, Any], prompt: int
) -> Replay:
    own_ids, own = _wide(replayed["ids"][rows]), replayed["logprobs"][rows]
    known = (claimed_ids[:, :, None] == own_ids[:, None, :]).any(axis=2)
    extra = (claimed_ids >= 0) & ~known & np.isfinite(replayed["claimed"][rows])
    return Replay(
        ids=np.concatenate([own_ids, np.where(extra, claimed_ids, -1)], axis=1),
        logprobs=np.concatenate([own, np.where(extra, replayed["claimed"][rows], -np.inf)], axis=1).astype(np.float32),
        form="full",
        reference=REFERENCE,
        own=own_ids.shape[1],
        routed_experts=_experts(replayed, rows, prompt),
    )


def _experts(arrays: dict[str, Any], rows: slice, prompt: int) -> NDArray[np.int16] | None:
    """(P+G−1, layers, slots); rows of the prompt were not kept and hold −1."""
    if "experts" not in arrays:
        return None
    block: NDArray[np.int16] = arrays["experts"][rows][:-1].astype(np.int16)
    whole: NDArray[np.int16] = np.concatenate([np.full((prompt, *block.shape[1:]), -1, np.int16), block])
    return whole


def _maybe(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with np.load(path, allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def _wide(ids: NDArray[Any]) -> NDArray[np.int32]:
    return np.where(ids == PAD, -1, ids.astype(np.int32)).astype(np.int32)


def recorded_names(folder: Path) -> list[str]:
    """Variants of which the folder holds answers and replays, in the order of `VARIANTS`."""
    return [
        name for name in VARIANTS if all((folder / f"{name}.{what}.npz").is_file() for what in ("answers", "replay"))
    ]
