"""What is asked in the end: a script, a server at a URL, or a vLLM server that the benchmark starts."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from benchmarks.cost import shape
from benchmarks.cost.engine import model_folder
from benchmarks.demo import models, servers
from benchmarks.harness import machine
from benchmarks.overhead.answer import MODEL, VOCABULARY
from policies.errors import CountersignError

SCRIPTED, SERVED = "scripted", "vllm"
NAME = "bench"
"""What a server that the benchmark starts calls its model."""
DEMO = "smollm2"
"""`--model smollm2`: the demo's model, built where it is missing."""
GPU_RUNTIME = "vllm-0.32-v2"


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend and what is declared of it.

    Attributes:
        url: without `/v1`; empty until it is started.
        model: its name there.
        folder: of the model, where it is on this machine.
        dummy: its weights are made up, and so are its words.
        declared: entries of `models.X` in the settings.
        command: starts it, but for the port; empty for one that runs already.
        runtime: its sampling noise.
    """

    kind: str
    url: str
    model: str
    runtime: str
    folder: Path | None = None
    dummy: bool = False
    declared: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()

    @property
    def vocabulary(self) -> int:
        """Token ids that exist; 0 where nobody said."""
        return int(self.declared.get("vocab_size", 0))


def chosen(options: Namespace) -> Backend:
    """The backend that the options ask for. Raises CountersignError where it cannot be."""
    if options.url:
        return _at(options)
    if options.backend == SCRIPTED:
        pace = (f"--first-ms={1000 * options.first}", f"--interval-ms={1000 * options.gap}")
        words = (sys.executable, "-m", "benchmarks.overhead.upstream", f"--tokens={longest(options)}", *pace)
        return Backend(SCRIPTED, "", MODEL, GPU_RUNTIME, declared={"vocab_size": VOCABULARY}, command=words)
    folder = _folder(options)
    dummy = str(options.model).startswith(shape.PREFIX)
    declared = declaration(folder, options.max_model_len, dummy=dummy)
    command = _on_gpu(options, folder, dummy) if on_gpu() else _on_cpu(options, folder, dummy)
    return Backend(SERVED, "", NAME, _runtime(options), folder, dummy, declared, tuple(command))


def longest(options: Namespace) -> int:
    """Tokens of the longest answer that is asked for."""
    return int(max(mix.longest.answer for mix in options.mix))


def on_gpu() -> bool:
    """Whether engines run on a GPU here."""
    return machine.gpu() is not None


def environment(options: Namespace) -> dict[str, str]:
    """Variables that every process gets which may hold an engine."""
    if on_gpu():
        return {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return servers.environment() | {"OMP_NUM_THREADS": str(options.threads)}


def declaration(folder: Path, max_model_len: int, *, dummy: bool) -> dict[str, Any]:
    """What `models.X` says of the model in a folder.

    Texts are held against ids only where the model is a real one: made-up weights answer with random ids, whose text
    is nobody's spelling.
    """
    config = json.loads((folder / "config.json").read_text())
    ends = config.get("eos_token_id")
    found: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "max_model_len": max_model_len,
        "eos_token_ids": ends if isinstance(ends, list) else [] if ends is None else [ends],
    }
    if (folder / "generation_config.json").is_file():
        found["generation_config"] = json.loads((folder / "generation_config.json").read_text())
    return found if dummy else found | {"tokenizer": str(folder / "tokenizer.json")}


def _at(options: Namespace) -> Backend:
    url = options.url.rstrip("/").removesuffix("/v1")
    folder = None if options.folder is None else Path(options.folder)
    declared = {} if folder is None else declaration(folder, options.max_model_len, dummy=False)
    return Backend("url", url, options.model or first_model(url, key()), _runtime(options), folder, declared=declared)


def key() -> str:
    """The key of a server at a URL."""
    return os.environ.get("COUNTERSIGN_BENCH_KEY", "")


def first_model(url: str, key: str = "") -> str:
    """The first model that a server lists. Raises CountersignError."""
    request = urllib.request.Request(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(orjson.loads(answer.read())["data"][0]["id"])
    except (OSError, ValueError, LookupError) as error:
        raise CountersignError(f"no model list at {url}/v1/models ({error})") from error


def _folder(options: Namespace) -> Path:
    if not options.model:
        raise CountersignError("bench overhead: --backend vllm needs --model: smollm2, a folder, or shape:qwen3-8b")
    if options.model == DEMO:
        return models.ensure(say=lambda text: print(f"bench overhead: {text}", file=sys.stderr)).bf16
    return Path(model_folder(options))


def _runtime(options: Namespace) -> str:
    return options.runtime or (GPU_RUNTIME if on_gpu() else servers.RUNTIME)


def _on_cpu(options: Namespace, folder: Path, dummy: bool) -> list[str]:
    command = servers.command(folder, 0, flags=_flags(options, dummy))
    return _without_port([*command, "--served-model-name", NAME, "--max-model-len", str(options.max_model_len)])


def _on_gpu(options: Namespace, folder: Path, dummy: bool) -> list[str]:
    settings = {
        "--model": str(folder),
        "--served-model-name": NAME,
        "--host": "127.0.0.1",
        "--dtype": "bfloat16",
        "--max-model-len": str(options.max_model_len),
        "--max-logprobs": "20",
        "--gpu-memory-utilization": str(options.gpu_share),
    }
    pairs = [part for pair in settings.items() for part in pair]
    module = ["-m", "vllm.entrypoints.openai.api_server"]
    return [sys.executable, *module, *pairs, "--enable-scale-out", *_flags(options, dummy)]


def _flags(options: Namespace, dummy: bool) -> list[str]:
    """`--serve`: true is a flag alone, false its opposite, anything else its value."""
    found = ["--load-format", "dummy"] if dummy else []
    for name, value in options.serve.items():
        if isinstance(value, bool):
            found.append(f"--{name}" if value else f"--no-{name}")
        else:
            found += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return found


def _without_port(words: list[str]) -> list[str]:
    at = words.index("--port")
    return words[:at] + words[at + 2 :]
