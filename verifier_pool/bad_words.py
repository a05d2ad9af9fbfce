"""What a model's tokenizer makes of a request's `bad_words`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from policies.evidence import Evidence
from policies.selection import bad_word_ids
from policies.settings import ModelSettings


def forbidden_ids(choice: Evidence, model: ModelSettings) -> Sequence[Sequence[int]] | None:
    """Token sequences of the choice's bad words; None where no readable tokenizer is declared."""
    words = choice.sampling.bad_words
    if not words:
        return ()
    tokenizer = _load(model.tokenizer) if model.tokenizer else None
    if tokenizer is None:
        return None

    def encode(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    try:
        return bad_word_ids(words, encode)
    except UnicodeError:  # a lone surrogate, which vLLM's tokenizer cannot read either
        return None


@lru_cache(maxsize=16)
def _load(path: str) -> Tokenizer | None:
    file = Path(path)
    try:
        return Tokenizer.from_file(str(file / "tokenizer.json" if file.is_dir() else file))
    except Exception:  # the library raises bare Exception
        return None
