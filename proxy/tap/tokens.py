"""Token strings as vLLM writes them, from the model's `tokenizer.json` alone.

vLLM decodes every id by itself. Where a token ends in half a character (byte-level BPE, byte fallback), it
decodes it again behind up to four tokens sampled before it, and what that adds is the token's string; when
the character stays incomplete, the string is empty.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTEXT = 4
_HALF = "\ufffd"


class TokenStrings:
    """The strings of one model's tokens. Out-of-vocabulary ids have empty strings."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._marker = _space_marker(tokenizer)
        self._alone: dict[int, str] = {}
        self._size = tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, path: str | Path) -> TokenStrings:
        """From a `tokenizer.json` or the folder that holds one. Raises OSError or ValueError."""
        # Only proxies whose models declare one need the library, which takes megabytes.
        from tokenizers import Tokenizer

        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        text = file.read_text(encoding="utf-8")
        try:
            return cls(Tokenizer.from_str(text))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file.name}: {error}") from error

    def alone(self, id: int) -> str:
        """The string of a token decoded by itself, U+FFFD where it is half a character."""
        text = self._alone.get(id)
        if text is None:
            text = self._decode([id])
            if self._marker is not None:
                text = self._with_spaces(id, text, self._marker)
            # A backend can name any number of ids that are none.
            if id < self._size:
                self._alone[id] = text
        return text

    def at(self, ids: Sequence[int], context: Sequence[int]) -> list[str]:
        """Strings of the alternatives at one position; `context` holds the tokens sampled before it."""
        texts = [self.alone(id) for id in ids]
        for at, text in enumerate(texts):
            if text.endswith(_HALF):
                texts[at] = self._completed(ids[at], context[-CONTEXT:])
        return texts

    def _completed(self, id: int, context: Sequence[int]) -> str:
        for count in range(1, len(context) + 1):
            before = list(context[-count:])
            whole = self._decode([*before, id])
            if whole.endswith(_HALF):
                continue
            clean = count
            while clean and self._decode([before[clean - 1]]).endswith(_HALF):
                clean -= 1
            prefix = self._decode(before[:clean]) if clean else ""
            return whole[_shared(prefix, whole) :]
        return ""

    def _decode(self, ids: list[int]) -> str:
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=False)
        except (OverflowError, TypeError):
            return ""

    def _with_spaces(self, id: int, text: str, marker: str) -> str:
        """Leading spaces that decoding strips from a SentencePiece piece."""
        try:
            piece = self._tokenizer.id_to_token(id) or ""
        except OverflowError:
            return text
        wanted = len(piece) - len(piece.lstrip(marker))
        return " " * (wanted - (len(text) - len(text.lstrip(" ")))) + text


def _shared(prefix: str, text: str) -> int:
    """Length of the common prefix."""
    if text.startswith(prefix):
        return len(prefix)
    return next((at for at, (a, b) in enumerate(zip(prefix, text, strict=False)) if a != b), 0)


def _space_marker(tokenizer: Tokenizer) -> str | None:
    """What stands for a space in the vocabulary, where decoding one token loses it; else None."""
    step: dict[str, Any] = json.loads(tokenizer.to_str()).get("pre_tokenizer") or {}
    steps = step.get("pretokenizers", []) if step.get("type") == "Sequence" else [step]
    return next((str(one.get("replacement", "▁")) for one in steps if one.get("type") == "Metaspace"), None)
