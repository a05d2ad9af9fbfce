"""Records answers of one engine variant, and replays and prefills of recorded answers, as arrays.

    python -m benchmarks.detection.record answers VARIANT --models DIR --out DIR
    python -m benchmarks.detection.record replay  --models DIR --out DIR [--moe]     every recorded variant
    python -m benchmarks.detection.record spoof   VARIANT … --models DIR --out DIR   the true model's own prefill

Needs only vLLM, numpy and this folder, so that it runs where nothing else is installed. Files in `--out`:
NAME.answers.npz, NAME.replay.npz, NAME.spoof.npz; `evidence.py` says what is in them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.detection.prompts import CALIBRATION_PROMPTS, HIDDEN, LONG_PROMPTS, PROMPTS
from benchmarks.detection.variants import EAGER, VARIANTS, Variant

TEMPERATURES = (0.0, 0.7, 1.0)
TOKENS = 128
TOP = 20
SPOOF_TOP = 21
WIDER = 64
"""Logprobs asked for where a runner cannot score given ids."""
PAD = 65_535
KV_BYTES = 4 << 30
KEPT_ENDS = 200
"""Tokens kept at each end of a truncated prompt."""

Arrays = dict[str, NDArray[Any]]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("answers", "replay", "spoof"))
    parser.add_argument("variants", nargs="*", metavar="VARIANT")
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--moe", action="store_true", help="replay the mixture-of-experts variants, and only those")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--every", type=int, default=1, help="ask only every so-manyth prompt")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    arguments.out.mkdir(parents=True, exist_ok=True)
    {"answers": answers, "replay": replay, "spoof": spoof}[arguments.what](arguments)


def answers(arguments: argparse.Namespace) -> None:
    """Asks one variant all prompts at every temperature."""
    from vllm import SamplingParams

    (name,) = arguments.variants
    variant = VARIANTS[name]
    moe = variant.model == "moe"
    engine = open_engine(arguments.models / variant.model, variant.engine, variant.together, moe)
    tokenizer = engine.get_tokenizer()
    jobs = list(_jobs(variant, arguments.every))
    visible = [_render(tokenizer, text) for text, _, _ in jobs]
    actual = [_changed(variant, tokenizer, text, ids) for (text, _, _), ids in zip(jobs, visible, strict=True)]
    params = [
        SamplingParams(
            temperature=t, seed=seed, max_tokens=arguments.tokens, logprobs=TOP, flat_logprobs=True, detokenize=False
        )
        for _, t, seed in jobs
    ]
    started = time.time()
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in actual], params, use_tqdm=False)
    seconds = time.time() - started
    rows = [_rows(output.outputs[0].logprobs, output.outputs[0].token_ids, TOP) for output in outputs]
    counts = [len(ids) for ids, _ in rows]
    arrays: Arrays = {
        "prompt": _narrow(np.concatenate(visible)),
        "prompt_tokens": np.array([len(ids) for ids in visible], np.int32),
        "actual_prompt_tokens": np.array([len(ids) for ids in actual], np.int32),
        "tokens": np.array(counts, np.int32),
        "temperature": np.array([t for _, t, _ in jobs], np.float32),
        "seed": np.array([seed for _, _, seed in jobs], np.int64),
        "stopped": np.array([output.outputs[0].finish_reason == "stop" for output in outputs]),
        "ids": _narrow(np.concatenate([ids for ids, _ in rows])),
        "logprobs": np.concatenate([values for _, values in rows]),
    }
    if moe:
        arrays["experts"] = np.concatenate([_experts(o, len(ids), n) for o, ids, n in zip(
            outputs, actual, counts, strict=True)])  # fmt: skip
    np.savez_compressed(arguments.out / f"{name}.answers.npz", **arrays)  # type: ignore[arg-type]
    print(f"{name}: {len(jobs)} answers, {sum(counts)} tokens in {seconds:.1f} s", flush=True)


def replay(arguments: argparse.Namespace) -> None:
    """The reference's own top 20 and the claimed ids for every recorded answer of every variant."""
    names = arguments.variants or [
        path.name.removesuffix(".answers.npz") for path in sorted(arguments.out.glob("*.answers.npz"))
    ]
    names = [name for name in names if (VARIANTS[name].model == "moe") == arguments.moe]
    engine = open_engine(arguments.models / ("moe" if arguments.moe else "bf16"), EAGER, 64, arguments.moe)
    for name in names:
        recorded = dict(np.load(arguments.out / f"{name}.answers.npz"))
        started = time.time()
        own, claimed, experts = [], [], []
        for output, prompt, ids in _prefills(engine, recorded, TOP, claims=True):
            own.append(_rows(output.prompt_logprobs, ids[:, 0], TOP))
            claimed.append(_claimed(output, ids, own[-1]))
            if arguments.moe:
                experts.append(_experts(output, len(prompt), len(ids)))
        arrays: Arrays = {
            "ids": _narrow(np.concatenate([ids for ids, _ in own])),
            "logprobs": np.concatenate([values for _, values in own]),
            "claimed": np.concatenate(claimed),
        }
        if experts:
            arrays["experts"] = np.concatenate(experts)
        np.savez_compressed(arguments.out / f"{name}.replay.npz", **arrays)  # type: ignore[arg-type]
        print(f"{name}: replayed in {time.time() - started:.1f} s", flush=True)


def spoof(arguments: argparse.Namespace) -> None:
    """The true model's top 21 for a cheap model's tokens, as the cheat gets them: its own engine, few at a time."""
    engine = open_engine(arguments.models / "bf16", EAGER, 4, False)
    for name in arguments.variants:
        recorded = dict(np.load(arguments.out / f"{name}.answers.npz"))
        rows = [
            _rows(output.prompt_logprobs, ids[:, 0], SPOOF_TOP)
            for output, _, ids in _prefills(engine, recorded, SPOOF_TOP, claims=False)
        ]
        np.savez_compressed(
            arguments.out / f"{name}.spoof.npz",
            ids=_narrow(np.concatenate([ids for ids, _ in rows])),
            logprobs=np.concatenate([values for _, values in rows]),
        )
        print(f"{name}: {len(rows)} answers prefilled by the true model", flush=True)


def open_engine(folder: Path, extra: dict[str, Any], together: int, moe: bool) -> Any:
    """A vLLM engine that shares its GPU with others: a fixed KV cache, and no look at free memory."""
    import torch
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": str(folder), "dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": together,
        "max_logprobs": WIDER, "enable_prefix_caching": moe, "disable_log_stats": True, "seed": 0,
    }  # fmt: skip
    if torch.cuda.is_available():
        settings |= {"gpu_memory_utilization": 0.12, "kv_cache_memory_bytes": KV_BYTES}
    if moe:
        settings["enable_return_routed_experts"] = True
    return LLM(**(settings | extra))


def _jobs(variant: Variant, every: int) -> Iterator[tuple[str, float, int]]:
    texts = {"ordinary": PROMPTS, "long": LONG_PROMPTS, "calibration": CALIBRATION_PROMPTS}[variant.prompts]
    for text in texts[:: variant.every * every]:
        for temperature in TEMPERATURES:
            digest = hashlib.sha256(f"{variant.name} {temperature} {text}".encode()).digest()
            yield text, temperature, int.from_bytes(digest[:8], "big") >> 2


def _render(tokenizer: Any, text: str, system: str | None = None) -> NDArray[np.int32]:
    messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return np.asarray(ids, np.int32)


def _changed(variant: Variant, tokenizer: Any, text: str, ids: NDArray[np.int32]) -> list[int]:
    if variant.change == "hidden":
        ids = _render(tokenizer, text, HIDDEN)
    if variant.change == "truncated":
        ids = np.concatenate([ids[:KEPT_ENDS], ids[-KEPT_ENDS:]])
    kept: list[int] = ids.tolist()
    return kept


def _prefills(engine: Any, recorded: Arrays, top: int, *, claims: bool) -> Iterator[tuple[Any, Any, Any]]:
    """Output of one prefill of prompt and answer, the prompt, and the claimed ids, per recorded answer."""
    from vllm import SamplingParams

    prompts = np.split(recorded["prompt"].astype(np.int32), np.cumsum(recorded["prompt_tokens"])[:-1])
    ids = np.split(_wide(recorded["ids"]), np.cumsum(recorded["tokens"])[:-1])
    given = claims and bool(getattr(engine.llm_engine.vllm_config, "use_v2_model_runner", False))
    params = [
        SamplingParams(
            max_tokens=1, temperature=0.0, flat_logprobs=True, detokenize=False,
            prompt_logprobs=top if given or not claims else WIDER,
            **({"prompt_logprob_token_ids": block, "prompt_logprob_start": len(prompt) - 1} if given else {}),
        )
        for prompt, block in zip(prompts, ids, strict=True)
    ]  # fmt: skip
    sequences = [np.concatenate([prompt, block[:, 0]]).tolist() for prompt, block in zip(prompts, ids, strict=True)]
    outputs = engine.generate([{"prompt_token_ids": sequence} for sequence in sequences], params, use_tqdm=False)
    yield from zip(outputs, prompts, ids, strict=True)


def _rows(flat: Any, emitted: Any, top: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """(G, top + 1) ids and logprobs, emitted token first; the last G rows of vLLM's flat logprobs."""
    emitted = np.asarray(emitted, np.int32)
    count = len(emitted)
    starts, ends = np.asarray(flat.start_indices[-count:]), np.asarray(flat.end_indices[-count:])
    span = slice(int(starts[0]), int(ends[-1]))
    ids, values = np.asarray(flat.token_ids[span], np.int32), np.asarray(flat.logprobs[span], np.float32)
    row = np.repeat(np.arange(count), ends - starts)
    out_ids, out = np.full((count, top + 1), -1, np.int32), np.full((count, top + 1), -np.inf, np.float32)
    own = ids == emitted[row]
    out_ids[row[own], 0], out[row[own], 0] = ids[own], values[own]
    others = np.flatnonzero(~own)
    others = others[np.lexsort((-values[others], row[others]))]
    rows = row[others]
    column = np.arange(len(others)) - np.searchsorted(rows, rows) + 1
    fits = column <= top
    out_ids[rows[fits], column[fits]], out[rows[fits], column[fits]] = ids[others][fits], values[others][fits]
    return out_ids, out


def _claimed(output: Any, ids: NDArray[np.int32], own: Any) -> NDArray[np.float32]:
    """(G, 21) the reference's logprobs of the claimed ids; −inf where it has none."""
    given = getattr(output, "prompt_token_id_logprobs", None)
    if given is not None:
        return np.asarray(given, np.float32)
    wide_ids, wide = _rows(output.prompt_logprobs, ids[:, 0], WIDER)
    same = (ids[:, :, None] == wide_ids[:, None, :]) & (ids >= 0)[:, :, None]
    found = np.take_along_axis(wide, same.argmax(axis=2), axis=1)
    result: NDArray[np.float32] = np.where(same.any(axis=2), found, -np.inf).astype(np.float32)
    return result


def _experts(output: Any, prompt: int, count: int) -> NDArray[np.uint8]:
    """(G, layers, slots) expert ids of the rows P … P+G−2, and 255 for the last token, which is never fed forward."""
    parts = [getattr(output, "prompt_routed_experts", None), getattr(output.outputs[0], "routed_experts", None)]
    whole = np.concatenate([np.asarray(part) for part in parts if part is not None])
    rows = whole[prompt : prompt + count - 1]
    result = np.full((count, *whole.shape[1:]), 255, np.uint8)
    result[: len(rows)] = rows
    return result


def _narrow(ids: NDArray[Any]) -> NDArray[np.uint16]:
    return np.where(ids < 0, PAD, ids).astype(np.uint16)


def _wide(ids: NDArray[Any]) -> NDArray[np.int32]:
    return np.where(ids == PAD, -1, ids.astype(np.int32)).astype(np.int32)


if __name__ == "__main__":
    main()
