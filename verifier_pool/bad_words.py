"""What a model's tokenizer makes of a request's `bad_words`."""

from __future__ import annotations

from collections.abc import Sequence

from policies.evidence import Evidence
from policies.selection import bad_word_ids
from policies.settings import ModelSettings
from verifier_pool.tokenizer import spelling_of


def forbidden_ids(choice: Evidence, model: ModelSettings) -> Sequence[Sequence[int]] | None:
    """Token sequences of the choice's bad words; None where no readable tokenizer is declared."""
    words = choice.sampling.bad_words
    if not words:
        return ()
    spelling = spelling_of(model)
    if spelling is None:
        return None
    try:
        return bad_word_ids(words, lambda text: spelling.encode(text).tolist())
    except (UnicodeError, TypeError):  # a lone surrogate, which vLLM's tokenizer cannot read either
        return None
