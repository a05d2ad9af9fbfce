"""Small real tokenizers, trained here in a moment: byte-level, and `▁` for spaces with bytes to fall back on."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from verifier_pool.tokenizer import TokenizerSpelling

TEXT = (Path(__file__).resolve().parents[2] / "LICENSE").read_text()
EOS, THINK, END_THINK = 0, 1, 2
SPECIAL = [AddedToken("<|end|>", special=True)]
ADDED = [AddedToken("<think>"), AddedToken("</think>")]


@cache
def byte_level() -> TokenizerSpelling:
    """As GPT-2, Llama 3, Qwen and SmolLM have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=[*SPECIAL, *ADDED],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    tokenizer.add_tokens(ADDED)
    return TokenizerSpelling(tokenizer)


@cache
def space_marked() -> TokenizerSpelling:
    """As Llama 2 and Mistral have it: a space before every text, bytes for unknown letters."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=[*SPECIAL, *ADDED, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    words = [word for line in TEXT.splitlines() for word in line.split(" ")]
    tokenizer.train_from_iterator(words, trainer)
    whole = json.loads(tokenizer.to_str())
    whole["added_tokens"] = [token for token in whole["added_tokens"] if not token["content"].startswith("<0x")]
    return TokenizerSpelling(Tokenizer.from_str(json.dumps(whole)))
