"""A model folder without weights, for engines that start with made-up ones (`load_format: dummy`).

How long a dense model takes depends on its shape, not on its weights. The tokenizer has as many entries as the real
one, so that turning ids into text costs what it costs, but it is no language's.

    python -m benchmarks.cost.shape FOLDER [--shape qwen3-8b]
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

PREFIX = "shape:"
"""`--model shape:NAME` stands for a folder of that shape, made on the spot."""

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 151936,
    },
}
SHAPES["tiny"] = SHAPES["qwen3-8b"] | {
    "bos_token_id": 2000,
    "eos_token_id": 2001,
    "head_dim": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "vocab_size": 2048,
}


def make(folder: Path, shape: str) -> Path:
    """Write the folder unless it is there; returns it. Raises KeyError for a shape nobody knows."""
    config = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer.json").exists():
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"})
        )
        _tokenizer(int(config["eos_token_id"])).save(str(folder / "tokenizer.json"))
    return folder


def _tokenizer(words: int) -> Tokenizer:
    """Bytes and made-up words up to id `words`, which is the end token."""
    letters = sorted(ByteLevel.alphabet())
    longer = ("Ġ" + "".join(each) for size in (1, 2, 3, 4) for each in itertools.product("etaoinshrdlu", repeat=size))
    others = ("".join(each) for size in (3, 4, 5) for each in itertools.product("bcdfghjklmnpqrtvwxz", repeat=size))
    entries = itertools.islice(itertools.chain(letters, longer, others), words)
    tokenizer = Tokenizer(BPE({entry: id for id, entry in enumerate(entries)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def main(arguments: Sequence[str] | None = None) -> int:
    """Make a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    options = parser.parse_args(arguments)
    make(options.folder, options.shape)
    return 0


if __name__ == "__main__":
    sys.exit(main())
