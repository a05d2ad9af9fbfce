"""Which engine is started: vLLM's asynchronous one, with defaults made for replays.

A replay is one prefill and never a decode step, and what bounds its memory differs by vLLM's runner:

* V2 (GPUs) computes prompt logprobs 1,024 rows at a time, a few hundred MB in all whatever the batch. Steps of 16,384
  tokens keep an H200 busy (an 8,192-token sequence and its like still pack well); GPUs below 70 GB take 8,192.
  `gpu_memory_utilization` 0.85 leaves room for those rows, which vLLM's profiling run does not see.
* V1 (CPUs) holds the logits of a whole step at once, twice, in float32: tokens × vocabulary × 8 bytes. A step is cut so
  that this stays within 1 GiB, between 256 and 2,048 tokens; 16 sequences at once are enough to fill it.

Whatever the operator's `engine:` names stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from verifier_pool.reference.scoring import MAX_CANDIDATES

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # A worker has threads when its engine starts (again), and a forked child may wait for their locks for ever.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""Set before vLLM is imported, unless the operator set them: no downloads, no telemetry, 1 GiB of KV cache."""

ENGINE_DEFAULTS: dict[str, Any] = {
    # A replay never reads the prefix cache (vLLM skips it for prompt logprobs), so do not fill it either.
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "max_logprobs": MAX_CANDIDATES,
    "worker_extension_cls": "verifier_pool.reference.lifeline.Lifeline",
}

GPU_MEMORY = 0.85
STEP_TOKENS = 16_384
SMALL_GPU_STEP_TOKENS = 8_192
SMALL_GPU = 70 << 30
SEQUENCES = 256
V1_SEQUENCES = 16
V1_STEP_BYTES = 1 << 30
V1_STEP_TOKENS = (256, 2_048)


def prepare_environment() -> None:
    """Set what vLLM reads while it is imported and started."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # What the lifeline inside the engine looks at.
    os.environ["VERIFIER_ENGINE_OWNER"] = str(os.getpid())


def engine_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the engine: ours, the operator's over them, and what replays cannot do without."""
    arguments = ENGINE_DEFAULTS | dict(given)
    most = int(arguments["max_logprobs"])
    arguments["max_logprobs"] = most if most == -1 else max(most, MAX_CANDIDATES)
    if arguments.get("enable_return_routed_experts") and "enable_prefix_caching" not in given:
        # vLLM keeps captured expert ids by the hash of their cache block; replays still read nothing from the cache.
        arguments["enable_prefix_caching"] = True
    # `LLM` takes it; the engine below it does not.
    arguments.pop("chat_template", None)
    return arguments


def step_limits(v2: bool, vocab_size: int, memory: int) -> dict[str, int]:
    """`max_num_batched_tokens` and `max_num_seqs` for a runner.

    Args:
        v2: whether it is vLLM's V2 runner.
        memory: of the device, in bytes.
    """
    if v2:
        tokens = STEP_TOKENS if memory >= SMALL_GPU else SMALL_GPU_STEP_TOKENS
        return {"max_num_batched_tokens": tokens, "max_num_seqs": SEQUENCES}
    least, most = V1_STEP_TOKENS
    fits = V1_STEP_BYTES // (8 * max(vocab_size, 1))
    return {"max_num_batched_tokens": min(most, max(least, fits)), "max_num_seqs": V1_SEQUENCES}


def build(path: str, given: Mapping[str, Any]) -> Any:
    """Start a `vllm.v1.engine.async_llm.AsyncLLM` on a model folder: blocks for seconds to minutes.

    Must run on the thread of the loop that will use it.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = _as_configs(engine_arguments(given))
    on_cpu = current_platform.is_cpu()
    memory = 0 if on_cpu else int(current_platform.get_device_total_memory())
    if not on_cpu:
        arguments.setdefault("gpu_memory_utilization", GPU_MEMORY)
    vocab_size = int(AsyncEngineArgs(model=path, **arguments).create_model_config().get_vocab_size())

    def config(v2: bool) -> Any:
        # Without chunks a whole sequence must fit into one step; vLLM then picks the step by the longest.
        chunked = arguments.get("enable_chunked_prefill", True)
        limits = step_limits(v2, vocab_size, memory) if chunked else {}
        chosen = AsyncEngineArgs(model=path, **limits | arguments)
        return chosen.create_engine_config(UsageContext.ENGINE_CONTEXT)

    found = config(v2=not on_cpu)
    if bool(getattr(found, "use_v2_model_runner", False)) == on_cpu:
        found = config(v2=on_cpu)
    return AsyncLLM.from_vllm_config(found, disable_log_stats=bool(arguments["disable_log_stats"]))


def _as_configs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Sections that YAML gives as mappings and vLLM's engine wants as objects, as `vllm.LLM` makes them."""
    from vllm.config import CompilationConfig, ProfilerConfig, StructuredOutputsConfig

    classes = {"structured_outputs_config": StructuredOutputsConfig, "profiler_config": ProfilerConfig}
    made = {name: classes[name](**value) for name, value in arguments.items() if name in classes and _is_map(value)}
    level = arguments.get("compilation_config")
    if isinstance(level, int) and not isinstance(level, bool):
        made["compilation_config"] = CompilationConfig(mode=level)
    return arguments | made


def _is_map(value: object) -> bool:
    return isinstance(value, Mapping)
