"""Evidence recorded from real vLLM servers, as `tests/data/evidence/README.md` describes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.evidence import Evidence, Replay, Sampling, Usage

FOLDER = Path(__file__).parent.parent / "data" / "evidence"
GPU = "vllm-0.32-v2"
CPU = "vllm-0.32-v1-cpu"
VOCABULARY = 49_152
EOS = 2
REFERENCE = "test-reference"


def evidence(prompt: NDArray[Any], ids: NDArray[Any], logprobs: NDArray[Any], **fields: Any) -> Evidence:
    """Evidence of one finished answer around a claim; the sampled tokens are the claim's first column."""
    claim_ids = ids.astype(np.int32)
    if ids.dtype == np.uint16:
        claim_ids[ids == 65_535] = -1
    output = np.ascontiguousarray(claim_ids[:, 0])
    defaults: dict[str, Any] = {
        "id": "0" * 32,
        "endpoint": "chat",
        "backend": "honest",
        "model": "smollm2",
        "precision": "bf16",
        "sampling": Sampling(),
        "finish_reason": "stop" if output[-1] == EOS else "length",
        "usage": Usage(len(prompt), len(output), len(prompt), len(output)),
    }
    return Evidence(
        prompt_ids=prompt.astype(np.int32),
        output_ids=output,
        claim_ids=claim_ids,
        claim_logprobs=logprobs.astype(np.float32),
        **{**defaults, **fields},
    )


@cache
def gpu(setting: str) -> tuple[Evidence, ...]:
    """H200, settings T1, T07 and T0."""
    temperature = {"T1": 1.0, "T07": 0.7, "T0": 0.0}[setting]
    with np.load(FOLDER / "h200_vllm0.32_smollm2.npz", allow_pickle=False) as data:
        names = [name[: -len("_y")] for name in data.files if name.startswith(f"{setting}_") and name.endswith("_y")]
        return tuple(_sampled(data, f"{name}_", temperature, GPU) for name in names)


@cache
def cpu(precision: str) -> tuple[Evidence, ...]:
    """CPU at T = 0.7, precisions `bf16` and `fp8sim`."""
    with np.load(FOLDER / f"cpu_vllm0.32_smollm2_{precision}_T0.7.npz", allow_pickle=False) as data:
        names = [name[: -len("_y")] for name in data.files if name.endswith("_y")]
        return tuple(_sampled(data, f"{name}_", 0.7, CPU) for name in names)


def _sampled(data: Any, prefix: str, temperature: float, runtime: str) -> Evidence:
    tokens = len(data[f"{prefix}y"])
    sampling = Sampling(temperature=temperature, seed=int(data[f"{prefix}seed"]), max_tokens=tokens)
    return evidence(
        data[f"{prefix}prompt"], data[f"{prefix}ids"], data[f"{prefix}lp"], sampling=sampling, runtime=runtime
    )


@cache
def truncated() -> tuple[Evidence, ...]:
    """CPU answers to requests with top-p, top-k, min-p, tiny temperatures, wide and negative seeds."""

    def each() -> Iterator[Evidence]:
        with np.load(FOLDER / "truncated_cpu_vllm0.32_smollm2.npz", allow_pickle=False) as data:
            for index, text in enumerate(data["settings"]):
                fields = json.loads(str(text))
                finish = fields.pop("finish")
                sampling = Sampling(**fields, max_tokens=48)
                yield evidence(
                    data[f"{index}_prompt"],
                    data[f"{index}_ids"],
                    data[f"{index}_lp"],
                    sampling=sampling,
                    runtime=CPU,
                    finish_reason=finish,
                )

    return tuple(each())


@cache
def processed(name: str = "processors_cpu_vllm0.32_smollm2.npz") -> dict[str, tuple[Evidence, list[list[int]]]]:
    """Answers to requests that change the logits before sampling, with the ids of their bad words, by name."""
    found = {}
    with np.load(FOLDER / name, allow_pickle=False) as data:
        for index, text in enumerate(data["settings"]):
            described = json.loads(str(text))
            lists = {
                key: tuple(tuple(item) if isinstance(item, list) else item for item in value)
                for key, value in described["sampling"].items()
                if isinstance(value, list)
            }
            found[described["name"]] = (
                evidence(
                    data[f"{index}_prompt"],
                    data[f"{index}_ids"],
                    data[f"{index}_lp"],
                    sampling=Sampling(**described["sampling"] | lists),
                    runtime=str(data["runtime"]),
                    finish_reason=described["finish"],
                ),
                described["bad_words"],
            )
    return found


@cache
def replayed(kind: str) -> tuple[tuple[Evidence, Replay], ...]:
    """CPU answers and their replays on the honest model, 40 tokens: `single`, `batch` or `fp8`."""

    def each() -> Iterator[tuple[Evidence, Replay]]:
        with np.load(FOLDER / "replayed_cpu_vllm0.32_smollm2.npz", allow_pickle=False) as data:
            for index in np.flatnonzero(data["kind"] == kind):
                sampling = Sampling(
                    temperature=float(data["temperature"][index]), seed=int(data["seed"][index]), max_tokens=64
                )
                claim = evidence(
                    data[f"{index}_prompt"], data[f"{index}_ids"], data[f"{index}_lp"], sampling=sampling, runtime=CPU
                )
                ids = data[f"{index}_rids"].astype(np.int32)
                ids[ids == 65_535] = -1
                yield claim, Replay(ids, data[f"{index}_rlp"], reference=REFERENCE)

    return tuple(each())


@cache
def gpu_limits() -> dict[str, Evidence]:
    """H200, several cuts at once: top-k with top-p, min-p, and all three, at T = 0.8 and 1.3."""
    with np.load(FOLDER / "h200_vllm0.32_limits.npz", allow_pickle=False) as data:
        names = [name[: -len("_y")] for name in data.files if name.endswith("_y")]
        return {name: _limited(data, name) for name in names}


def _limited(data: Any, name: str) -> Evidence:
    temperature, top_k, top_p, min_p = data[f"{name}_params"].tolist()
    seed = int(data[f"{name}_seed"])
    sampling = Sampling(temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p, seed=seed)
    ids, logprobs = data[f"{name}_ids"], data[f"{name}_lp"]
    return evidence(data[f"{name}_prompt"], ids, logprobs, runtime=GPU, sampling=sampling)
