"""How a model's tokenizer spells: the one thing that holding text against ids needs from outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from policies.evidence import Ids


class Spelling(Protocol):
    """A declared model's tokenizer. Ids outside its vocabulary spell nothing."""

    @property
    def added(self) -> Mapping[int, str]:
        """Tokens added to the vocabulary (`<|im_end|>`, `<think>`, …) and their text, special or not."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Those that decoding with `skip_special_tokens` leaves out."""

    def decode(self, ids: Ids, *, skip_special_tokens: bool) -> str:
        """The text of all ids at once; U+FFFD stands for bytes that are no UTF-8."""

    def steps(self, ids: Ids, *, context: Ids, skip_special_tokens: bool) -> list[str] | None:
        """What each id adds to the text when they come one by one after `context`.

        Half a character adds nothing until the ids that complete it come, and nothing at all at the end. None where
        so many make no character that telling would take more than linear time, which no honest answer's do.
        """

    def encode(self, text: str) -> Ids:
        """int32, the canonical ids of a text, without any that the tokenizer would put around it."""

    def pieces(self, ids: Ids) -> Sequence[bytes] | None:
        """The bytes of each id, so that they join to the text's UTF-8; None where the tokenizer has no such pieces.

        A tokenizer that puts a space before every text has it as part of the first piece.
        """
