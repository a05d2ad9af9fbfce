"""What is recorded: engines that make the declared model honestly in other ways, and engines that cheat."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

EAGER: dict[str, Any] = {"enforce_eager": True}


@dataclass(frozen=True, slots=True)
class Variant:
    """One engine and how it is asked.

    Attributes:
        honest: it is the declared model at the declared precision.
        model: folder under the models' folder.
        engine: keyword arguments of the engine.
        together: requests in flight at once.
        prompts: the ordinary prompts, the long documents, or the prompts that profiles are made of.
        change: what the backend does to the prompt and does not tell: adds a system prompt, or drops the middle.
        every: asks only every so-manyth prompt.
        gpu: only where there is one.
    """

    name: str
    about: str
    honest: bool
    model: str = "bf16"
    engine: dict[str, Any] = field(default_factory=dict)
    together: int = 64
    prompts: Literal["ordinary", "long", "calibration"] = "ordinary"
    change: Literal["", "hidden", "truncated"] = ""
    every: int = 1
    gpu: bool = False


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("calibration-eager", "eager, 64 at once", True, engine=EAGER, prompts="calibration"),
        Variant("calibration-graphs", "CUDA graphs and compiled kernels", True, prompts="calibration", gpu=True),
        Variant("eager-64", "eager, 64 at once", True, engine=EAGER),
        Variant("eager-8", "eager, 8 at once", True, engine=EAGER, together=8, every=2),
        Variant("eager-1", "eager, one at a time", True, engine=EAGER, together=1, every=4),
        Variant("graphs-64", "CUDA graphs and compiled kernels, 64 at once", True, gpu=True),
        Variant("graphs-8", "CUDA graphs, 8 at once", True, together=8, every=2, gpu=True),
        Variant("chunks-256", "eager, prefill in chunks of 256", True, engine=EAGER | {"max_num_batched_tokens": 256}),
        Variant(
            "triton", "Triton attention", True, engine=EAGER | {"attention_backend": "TRITON_ATTN"}, gpu=True, every=2
        ),
        Variant("long", "long documents, 16 at once", True, engine=EAGER, together=16, prompts="long"),
        Variant(
            "speculative",
            "n-gram speculative decoding",
            True,
            engine=EAGER
            | {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
            every=2,
        ),
        Variant("fp8", "FP8 weights, vLLM's own quantisation", False, engine=EAGER | {"quantization": "fp8"}, gpu=True),
        Variant("kv-fp8", "FP8 key-value cache", False, engine=EAGER | {"kv_cache_dtype": "fp8"}, gpu=True),
        Variant("fp8-rounded", "weights rounded to FP8", False, "fp8", EAGER, every=2),
        Variant("int8", "weights rounded to int8, a scale per row", False, "int8", EAGER, every=2),
        Variant("int4", "weights rounded to int4, a scale per 32", False, "int4", EAGER, every=2),
        Variant("dropped", "2 of 30 layers left out", False, "dropped", EAGER, every=2),
        Variant(
            "perturbed",
            "weights times (1 + 0.02 noise), as after light fine-tuning",
            False,
            "perturbed",
            EAGER,
            every=2,
        ),
        Variant("hidden", "a system prompt of its own", False, engine=EAGER, change="hidden", every=2),
        Variant(
            "truncated",
            "middle of long documents left out",
            False,
            engine=EAGER,
            together=16,
            prompts="long",
            change="truncated",
        ),
        Variant("moe", "mixture of experts", True, "moe", EAGER, gpu=True, every=2),
        Variant("moe-graphs", "mixture of experts, CUDA graphs", True, "moe", gpu=True, every=2),
        Variant(
            "moe-fp8",
            "mixture of experts, FP8 weights",
            False,
            "moe",
            EAGER | {"quantization": "fp8"},
            gpu=True,
            every=2,
        ),
    )
}
