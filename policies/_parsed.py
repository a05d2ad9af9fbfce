"""Is a parsed answer made of pieces of the text its ids spell?

Parsers cut the text: markup goes, one part becomes reasoning, another content, others tool calls. They add no words,
and they drop none: whoever offers a few stretches of a text could make it say anything.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from policies.evidence import Evidence

MOST_PIECES = 4
"""Pieces of the text that content or reasoning may be put together from, for each part there is beside it."""
CALL_ROOM = 128
"""Characters of markup around each tool call, besides its name and arguments, which may be spelled at length."""
_TAKEN = "\0"
_MARK = "\1"
_WORDS = re.compile(r"analysis|commentary|final|assistant|Here(?: i|')s my (?:thought process|response):")
"""What some templates write between reasoning and content without a tag."""
_BEGUN = re.compile(r"<[\w:|]{0,40}(?:>[^<\0]*)?$")
"""A call that a limit or a stop string cut off at its beginning, which streams hold back until there is more of it."""
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_CONSTANTS: dict[bool | None, tuple[str, ...]] = {
    True: ("true", "True"), False: ("false", "False"), None: ("null", "None"),
}  # fmt: skip
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def made_of(evidence: Evidence, text: str, markup: re.Pattern[str], *, finished: bool, named: bool) -> bool:
    """Whether content, reasoning and every tool call come from `text`, and nothing of it is gone but markup.

    Args:
        markup: what parsers take out besides their own words.
        finished: the answer is whole; otherwise its end may be missing.
        named: the request forces a call by name.
    """
    # A piece that looks like a bit of markup is no bit of it, as long as there is another place for it.
    bare = markup.sub(lambda found: _MARK * len(found[0]), text)
    return any(_made_of(evidence, each, markup, finished=finished, named=named) for each in (bare, text))


def _made_of(evidence: Evidence, text: str, markup: re.Pattern[str], *, finished: bool, named: bool) -> bool:
    most = MOST_PIECES + len(evidence.tool_calls)
    rest = text
    for part in (evidence.reasoning, evidence.text):
        others = without(part, rest, most)
        if others is None:
            return False
        rest = others
    cut = evidence.finish_reason == "length" or isinstance(evidence.stop_reason, str)
    whole = _BEGUN.sub("", rest) if cut else rest
    left = _WORDS.sub("", markup.sub("", whole.replace(_TAKEN, "").replace(_MARK, "")))
    room = sum(CALL_ROOM + len(name) + 3 * len(arguments) for name, arguments in evidence.tool_calls)
    if finished and len("".join(left.split())) > room:
        return False
    return _calls_hold(evidence.tool_calls, rest, evidence.request if named else b"")


def _calls_hold(calls: Sequence[tuple[str, str]], rest: str, request: bytes) -> bool:
    """Whether each call stands in what content and reasoning left, as often as it was made.

    The name of a call that the request itself forces need not stand there.
    """
    sources = _Sources(rest)
    names = Counter(name for name, _ in calls)
    return all(
        (rest.count(name) >= names[name] or name.encode("utf-8", "replace") in request) and sources.hold(arguments)
        for name, arguments in calls
    )


def without(part: str, text: str, most: int) -> str | None:
    """What of `text` is left where `part` is at most `most` stretches of it, in their order; None where it is not.

    White space at their ends aside. What is taken is overwritten, so that it is not taken twice.
    """
    at = 0
    rest = part.strip()
    kept = []
    for _ in range(most):
        if not rest:
            break
        start, length = _longest(rest, text, at)
        if not length:
            return None
        kept.append(text[at:start] + _TAKEN * length)
        at = start + length
        rest = rest[length:].lstrip()
    return None if rest else "".join(kept) + text[at:]


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
        self._numbers: frozenset[float] | None = None

    def hold(self, arguments: str) -> bool:
        """Whether the arguments stand in the text, or each of their values does."""
        if arguments.strip() in self._text:
            return True
        if self._squeezed is None:
            self._squeezed = "".join(self._text.split())
        if "".join(arguments.split()) in self._squeezed:
            return True
        try:
            value = json.loads(arguments, parse_int=float)
        except (ValueError, RecursionError):
            return False
        return all(map(self._holds, _values(value)))

    def _holds(self, value: str | float | None) -> bool:
        if value is None or isinstance(value, bool):
            return any(word in self._text for word in _CONSTANTS[value])
        if isinstance(value, float):
            if self._numbers is None:
                self._numbers = frozenset(map(float, _NUMBER.findall(self._text)))
            return value in self._numbers
        return self._holds_string(value)

    def _holds_string(self, string: str) -> bool:
        if string.strip() in self._text:
            return True
        if self._plain is None:
            plain = _ESCAPE.sub(_unescaped, self._text)
            self._plain = _SURROGATES.sub(_joined, plain)
        return string.strip() in self._plain


def _values(value: Any) -> Iterator[str | float | None]:
    """Every string, key, number and constant."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _values(item)
    elif isinstance(value, list):
        for item in value:
            yield from _values(item)
    else:
        yield value


def _unescaped(match: re.Match[str]) -> str:
    code, letter = match[1], match[2]
    return chr(int(code, 16)) if code else _LETTERS.get(letter, letter)


def _joined(match: re.Match[str]) -> str:
    return match[0].encode("utf-16", "surrogatepass").decode("utf-16")
