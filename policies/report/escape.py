"""Hostile text, made harmless: spelt out where it is invisible, and escaped.

Tokens are whatever a backend sends. Nothing in them may move a cursor, reorder what stands around them, or become
markup.
"""

from __future__ import annotations

import codecs
import html
from collections.abc import Iterable, Sequence

from policies.seen import all_seen, can_be_seen

LONGEST = 200
"""Characters of one token, or of one word from outside, that are shown."""


def visible(text: str, kept: str = "") -> str:
    """Text in which every character can be seen: those that cannot are spelt ⟨U+202E⟩, but for `kept`."""
    if all_seen(text):
        return text
    return "".join(char if char in kept or can_be_seen(char) else f"⟨U+{ord(char):04X}⟩" for char in text)


def escaped(text: object, kept: str = "") -> str:
    """The same for HTML, between tags or in a quoted attribute."""
    return html.escape(visible(str(text), kept), quote=True)


def cut(text: str, most: int = LONGEST) -> str:
    """Text of a bounded length."""
    return text if len(text) <= most else text[: most - 1] + "…"


def characters(pieces: Iterable[bytes]) -> list[str]:
    """The text of each token: a character that several of them make belongs to the last one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(piece) for piece in pieces]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


def lines(parts: Sequence[str]) -> str:
    """Parts of a page."""
    return "\n".join(filter(None, parts))
