"""Turns the demo's GGUF file into two model folders. Run in its own process: it needs torch and 1.5 GB of memory.

python -m benchmarks.demo.convert FILE.gguf TARGET                 writes TARGET/bf16 and TARGET/fp8
python -m benchmarks.demo.convert --variant NAME BF16 TARGET       writes a copy of the folder BF16, altered
"""

from __future__ import annotations

import json
import shutil
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
            if is_linear(name, weight):
                scale = (weight.abs().amax(dim=1, keepdim=True).float() / FP8_MAX).clamp_min(1e-12)
                rounded = (weight.float() / scale).to(torch.float8_e4m3fn).float() * scale
                weight.copy_(rounded.to(weight.dtype))


def is_linear(name: str, weight: Any) -> bool:
    """Whether a quantiser would touch this tensor: a matrix, but no embedding and no output head."""
    return bool(weight.ndim == 2 and "embed" not in name and "lm_head" not in name)


def alter(name: str, tensors: dict[str, Any], layers: int) -> tuple[dict[str, Any], int]:
    """The weights of a cheat's copy and its number of layers.

    int8           every linear weight to −127 … 127 times one scale per output row.
    int4           every linear weight to −7 … 7 times one scale per 32 inputs. The demo's model comes from Q4_1,
                   which has 16 levels from a minimum per 32 inputs: rounding to *that* grid would lose nothing.
                   This one is symmetric around zero, so it is another grid, and loses.
    layer-dropped  without two layers of the middle.
    other          every linear weight plus a random update of rank 8 with a tenth of its norm, as a fine-tune's
                   merged adapter; nobody trained it.

    Raises KeyError for another name.
    """
    if name == "layer-dropped":
        return drop_layers(tensors, layers, count=2), layers - 2
    change = {"int8": _to_int8, "int4": _to_int4, "other": _updated}[name]
    return {key: change(key, weight) if is_linear(key, weight) else weight for key, weight in tensors.items()}, layers


def drop_layers(tensors: dict[str, Any], layers: int, count: int) -> dict[str, Any]:
    """The tensors without `count` layers of the middle, the later ones renumbered."""
    first = (layers - count) // 2
    kept = {}
    for key, weight in tensors.items():
        head, found, tail = key.partition(".layers.")
        if not found:
            kept[key] = weight
            continue
        number, _, rest = tail.partition(".")
        at = int(number)
        if not first <= at < first + count:
            kept[f"{head}.layers.{at if at < first else at - count}.{rest}"] = weight
    return kept


def _to_int8(name: str, weight: Any) -> Any:
    scale = (weight.float().abs().amax(dim=1, keepdim=True) / 127).clamp_min(1e-12)
    return ((weight.float() / scale).round() * scale).to(weight.dtype)


def _to_int4(name: str, weight: Any) -> Any:
    groups = weight.float().reshape(weight.shape[0], -1, 32)
    scale = (groups.abs().amax(dim=2, keepdim=True) / 7).clamp_min(1e-12)
    return ((groups / scale).round() * scale).reshape(weight.shape).to(weight.dtype)


def _updated(name: str, weight: Any) -> Any:
    import torch

    random = torch.Generator().manual_seed(sum(name.encode()))
    left, right = (torch.randn(size, 8, generator=random) for size in weight.shape)
    update = left @ right.T
    return (weight.float() + 0.1 * update * (weight.float().norm() / update.norm())).to(weight.dtype)


def convert_variant(name: str, source: Path, target: Path) -> None:
    """Write the altered copy of the model in `source`; `target` must not exist yet."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, ignore=shutil.ignore_patterns("model.safetensors"))
    config = json.loads((source / "config.json").read_text())
    tensors, layers = alter(name, load_file(source / "model.safetensors"), config["num_hidden_layers"])
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}, indent=2))
    whole = {key: weight.contiguous() for key, weight in tensors.items()}
    save_file(whole, target / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    if sys.argv[1] == "--variant":
        convert_variant(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
