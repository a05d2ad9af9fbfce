"""What the operator of the stage declares: settings, and profiles measured on the toy's own honest answers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.chaos import toy
from benchmarks.chaos.engine import LONGEST
from benchmarks.chaos.upstream import CHEAT, model_number
from policies import distance, margin, profile
from policies.evidence import Evidence, Replay, Sampling
from policies.profile import Profile, ProfileKey
from policies.settings import hash_key

HONEST = "honest"
CHEATING = "cheating"
PRECISION = "bf16"
LOST_AFTER = 6
REPLAY_WAIT = 10
CALIBRATION = 150
"""Honest answers per temperature that a profile is made of."""
TEMPERATURES = (0.0, 0.8)
OUTPUT_TOKENS = 24


def settings(
    *,
    redis_port: int,
    upstream_port: int,
    references: dict[str, dict[str, Any]],
    profiles: dict[str, Path],
    keys: Sequence[str],
    port: int = 0,
    aof: bool = True,
) -> dict[str, Any]:
    """The settings tree of one process.

    Args:
        references: settings of the reference by model; every model has an honest and a cheating backend.
        keys: client keys; each may choose its backend, so that the share of cheats stays what it is.
    """
    backends = []
    for model in references:
        declared = {"model": model, "runtime": toy.RUNTIME, "precision": PRECISION, "engine": toy.ENGINE}
        base = f"http://127.0.0.1:{upstream_port}"
        for name, url in ((HONEST, base), (CHEATING, base + CHEAT)):
            backends.append({"name": f"{name}-{model}", "url": url, **declared})
    models = {
        model: {
            "vocab_size": toy.VOCABULARY,
            "max_model_len": LONGEST,
            "profile": str(profiles[model]),
            "reference": reference,
        }
        for model, reference in references.items()
    }
    verification = {"lost_after": LOST_AFTER, "replay_wait": REPLAY_WAIT, "job_timeout": 20, "inline_wait": 4.0}
    return {
        "host": "127.0.0.1",
        "port": port,
        "redis_url": f"redis://127.0.0.1:{redis_port}",
        "models": models,
        "backends": backends,
        "keys": [{"name": f"client-{n}", "sha256": hash_key(key), "admin": True} for n, key in enumerate(keys)],
        "audit": {"rate": 0.6, "full": 0.6, "secret": secrets.token_hex(16)},
        "verification": verification,
        "durability": {"aof": aof},
        # The ledger reads every write from the append-only file, which is therefore not written anew.
        "storage": {"rewrite_seconds": 0},
        # Nothing sends them, so that the outbox keeps every verdict's id.
        "webhook": {"url": "https://example.com/hook", "secret": "whsec_" + "c2VjcmV0" * 5},
    }


def server(port: int) -> dict[str, Any]:
    """Settings of the scripted reference server."""
    return {"kind": "vllm_http", "url": f"http://127.0.0.1:{port}", "timeout": 3.0, "canary_seconds": 5.0}


def engine(path: str) -> dict[str, Any]:
    """Settings of a real engine on a CPU."""
    given = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4}
    return {"kind": "vllm_engine", "path": path, "canary_seconds": 5.0, "engine": given}


def write(folder: Path, name: str, tree: dict[str, Any]) -> Path:
    """The settings as a file in the folder."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def measured(model: str) -> Profile:
    """A profile of honest answers to this toy, as the scripted reference replays them."""
    rows: list[profile.Row] = []
    random = np.random.default_rng([7, model_number(model)])
    for temperature in TEMPERATURES:
        for _ in range(CALIBRATION):
            prompt = random.integers(0, toy.VOCABULARY, toy.PROMPT_TOKENS).tolist()
            evidence, replay = pair(model, prompt, temperature, int(random.integers(2**40)))
            for check in (distance, margin):
                rows += check.calibration_rows(evidence, replay)
    key = ProfileKey(
        model=model,
        runtime=toy.RUNTIME,
        precision=PRECISION,
        engine=toy.ENGINE,
        reference=f"vllm_http vllm-{toy.VERSION} {model}",
    )
    return profile.fit(rows, key, made={"by": "countersign bench chaos"})


def pair(model: str, prompt: list[int], temperature: float, seed: int, *, served: int = 0) -> tuple[Evidence, Replay]:
    """An answer by the toy that is `served` numbers from the declared one, and its replay in form `full`."""
    number = model_number(model)
    drawn = toy.draw(prompt, OUTPUT_TOKENS, temperature, seed, toy.table(number + served, kernels=1))
    evidence = Evidence(
        id=secrets.token_hex(16),
        endpoint="chat",
        backend=f"{HONEST}-{model}",
        model=model,
        sampling=Sampling(temperature=temperature, seed=seed, max_tokens=OUTPUT_TOKENS),
        runtime=toy.RUNTIME,
        precision=PRECISION,
        engine=toy.ENGINE,
        prompt_ids=np.asarray(prompt, np.int32),
        output_ids=drawn.output_ids,
        claim_ids=drawn.claim_ids,
        claim_logprobs=drawn.claim_logprobs,
        finish_reason="length",
    )
    previous = np.concatenate([[prompt[-1]], drawn.output_ids[:-1]])
    ids, logprobs = toy.listed(previous, drawn.output_ids, toy.table(number))
    own, claimed = ids.shape[1], toy.table(number)[previous]
    extra = np.where((drawn.claim_ids[:, :, None] == ids[:, None, :]).any(axis=2), -1, drawn.claim_ids)
    values = np.where(extra < 0, -np.inf, np.take_along_axis(claimed, np.maximum(extra, 0), axis=1))
    both = np.concatenate([ids, extra], axis=1), np.concatenate([logprobs, values.astype(np.float32)], axis=1)
    return evidence, replace(Replay(*both, "full"), own=own, reference=f"vllm_http vllm-{toy.VERSION} {model}")
