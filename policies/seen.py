"""Which characters can be seen: many are printable by their category, and show nothing."""

from __future__ import annotations

import re

_UNSEEN = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""What Unicode calls default-ignorable, much of it printable by its category, and the blank pattern of Braille."""


def can_be_seen(char: str) -> bool:
    """Whether a character shows, or is the space."""
    return char.isprintable() and _UNSEEN.match(char) is None


def all_seen(text: str) -> bool:
    """Whether all characters of a text can be seen."""
    return text.isprintable() and _UNSEEN.search(text) is None
