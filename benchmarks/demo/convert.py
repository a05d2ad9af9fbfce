"""Turns the demo's GGUF file into two model folders. Run in its own process: it needs torch and 1.5 GB of memory.

python -m benchmarks.demo.convert FILE.gguf TARGET     writes TARGET/bf16 and TARGET/fp8
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FP8_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""


def convert(gguf: Path, target: Path) -> None:
    """Write both folders; `target` must not exist yet."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # Left in place, these make save_pretrained write packed weights again.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    for name in ("bf16", "fp8"):
        if name == "fp8":
            round_weights(model)
        model.save_pretrained(target / name)
        tokenizer.save_pretrained(target / name)
        (target / name / "generation_config.json").write_text(json.dumps(generation_config(model.config), indent=2))


def generation_config(config: Any) -> dict[str, Any]:
    """Only where an answer starts and ends: no sampling defaults, as the package names none."""
    return {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def round_weights(model: Any) -> None:
    """Round every linear weight through float8_e4m3 with one scale per output row, in place.

    Embeddings stay, and so does the output head tied to them. The result is stored in bf16 again, which any
    CPU runs, and whose numbers are those of a worker with FP8 weights and bf16 activations.
    """
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name and "lm_head" not in name:
                scale = (weight.abs().amax(dim=1, keepdim=True).float() / FP8_MAX).clamp_min(1e-12)
                rounded = (weight.float() / scale).to(torch.float8_e4m3fn).float() * scale
                weight.copy_(rounded.to(weight.dtype))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
