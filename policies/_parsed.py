"""Is a parsed answer made of pieces of the text its ids spell?

Parsers cut the text: markup goes, one part becomes reasoning, another content, others tool calls. They add no words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from policies.evidence import Evidence

MOST_PIECES = 4
"""Pieces of the text that content or reasoning may be put together from, for each part there is beside it."""
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def made_of(evidence: Evidence, text: str) -> bool:
    """Whether content, reasoning and every tool call come from `text`."""
    most = MOST_PIECES + len(evidence.tool_calls)
    if not (in_pieces(evidence.text, text, most) and in_pieces(evidence.reasoning, text, most)):
        return False
    sources = _Sources(text)
    return all(
        (name in text or name.encode("utf-8", "replace") in evidence.request) and sources.hold(arguments)
        for name, arguments in evidence.tool_calls
    )


def in_pieces(part: str, text: str, most: int) -> bool:
    """Whether `part` is at most `most` stretches of `text`, in their order, white space at their ends aside."""
    at = 0
    rest = part.strip()
    for _ in range(most):
        if not rest:
            return True
        start, length = _longest(rest, text, at)
        if not length:
            return False
        at = start + length
        rest = rest[length:].lstrip()
    return not rest


def _longest(rest: str, text: str, at: int) -> tuple[int, int]:
    """Where after `at` the longest beginning of `rest` stands, and how long it is."""
    start, low, high = text.find(rest, at), 0, len(rest)
    if start >= 0:
        return start, high
    while high - low > 1:
        middle = (low + high) // 2
        found = text.find(rest[:middle], at)
        if found >= 0:
            start, low = found, middle
        else:
            high = middle
    return start, low


class _Sources:
    """The text as parsers may have read it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._squeezed: str | None = None
        self._plain: str | None = None

    def hold(self, arguments: str) -> bool:
        """Whether the arguments stand in the text, or each of their strings does."""
        if arguments.strip() in self._text:
            return True
        if self._squeezed is None:
            self._squeezed = "".join(self._text.split())
        if "".join(arguments.split()) in self._squeezed:
            return True
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return False
        return all(map(self._holds, _strings(value)))

    def _holds(self, string: str) -> bool:
        if string.strip() in self._text:
            return True
        if self._plain is None:
            plain = _ESCAPE.sub(_unescaped, self._text)
            self._plain = _SURROGATES.sub(_joined, plain)
        return string.strip() in self._plain


def _strings(value: Any) -> Iterator[str]:
    """Every string and key; numbers may be spelled otherwise."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _unescaped(match: re.Match[str]) -> str:
    code, letter = match[1], match[2]
    return chr(int(code, 16)) if code else _LETTERS.get(letter, letter)


def _joined(match: re.Match[str]) -> str:
    return match[0].encode("utf-16", "surrogatepass").decode("utf-16")
