"""Where in a text does a tool call stand, with just this name and just these arguments?

Three shapes are known, which most models write: an object with name and arguments (or a list of such), alone or between
tags; a name, a mark or two, and an object of arguments; and tags with the name and then, for each argument in turn, its
key and its value. An object in the text must *be* the arguments, key by key and value by value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from policies._effort import Effort

Span = tuple[int, int]
Call = tuple[str, str]

_COMPILED, _PER_LETTER = 2000, 50
"""Work of making a pattern of a word, and of each of its letters."""
_LEAD_WORK = 200

MOST_OBJECTS = 256
"""Places in a text at which an object may begin that are tried for one call."""
MOST_READ = 4
"""How often a text is read through for one call: an object may hold others."""
LONGEST_LEAD = 160
"""Characters in which the name stands before its object of arguments."""
_BRACKET = re.compile(r"[{\[]")
_BETWEEN = r"(?:[\s:=>|\]\[\"'(]|<[^<>\s]{1,40}>|:\d+|\[ARGS\]|```|json|commentary)*"
"""What stands between a name and its object of arguments."""
_KIND = "tool|func|call|invoke"
_ROLE = (
    rf"(?:<(?=[^<>]*(?:{_KIND}))[\w:|-]{{1,40}}=|function\s*<[^<>\s]{{1,40}}>|"
    r"(?:(?:assistant|commentary)\s*)?to=)?(?:functions\.)?"
)
"""What some formats write before a name."""
_HEAD = r"(?:<[\w:|-]{1,40}(?:=|\s+name=)\"?|<[\w:|-]{1,40}>\s*)"
_TO_VALUE = re.compile(r"\"?>?\s*(?:</?[\w:|-]{1,40}>\s*)*")
_CLOSED = re.compile(r"\s*</[\w:|-]{1,40}>")
_CLOSING = re.compile(r"</[\w:|-]{1,40}>")
_OPENED = re.compile(r"[{<]")
_FENCE = re.compile(r"\s*```")
_FIELDS = {"name", "arguments", "parameters", "id", "type", "index"}
_decoder = json.JSONDecoder()


def spans(calls: Sequence[Call], text: str, *, effort: Effort, named: str = "", cut: bool = False) -> list[Span] | None:
    """Where each of the calls stands in `text`, in their order and apart; None where one does not.

    Args:
        effort: what may be spent on it.
        named: the function whose call is forced, and whose name need not be there.
        cut: the answer's end is missing, and so may the last call's be.

    Raises TooMuchError.
    """
    found: list[Span] = []
    at = left = 0
    while left < len(calls):
        place = _whole(calls[left:], text, at, named, effort)
        if place is None and cut and left == len(calls) - 1:
            place = _broken(calls[left], text, at)
        if place is None:
            return None
        span, many = place
        found.append(span)
        at = span[1]
        left += many
    return found


def _whole(calls: Sequence[Call], text: str, at: int, named: str, effort: Effort) -> tuple[Span, int] | None:
    """Where the first of the calls stands after `at`, and how many of them stand there."""
    name, arguments = calls[0]
    if not name or len(name) > LONGEST_LEAD:
        return None
    effort.spend(_COMPILED + len(arguments))
    try:
        wanted = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return None
    lead = re.compile(rf"(?:(?<![\w.-])|(?=<)){_ROLE}{re.escape(name)}{_BETWEEN}\Z")
    for start, end, value in _objects(text, at, effort):
        listed = value if isinstance(value, list) else [value]
        if 0 < len(listed) <= len(calls) and all(
            _is_call(each, call, effort) for each, call in zip(listed, calls, strict=False)
        ):
            return (start, end), len(listed)
        effort.spend(_LEAD_WORK)
        if isinstance(value, dict) and _same(value, wanted):
            before = lead.search(text[max(at, start - LONGEST_LEAD) : start])
            if before is not None:
                fence = _FENCE.match(text, end) if "```" in before[0] else None
                return (start - len(before[0]), fence.end() if fence else end), 1
            if name == named:
                return (start, end), 1
    span = _tagged(name, wanted, text, at, effort) if isinstance(wanted, dict) else None
    return None if span is None else (span, 1)


def _objects(text: str, at: int, effort: Effort) -> Iterator[tuple[int, int, Any]]:
    """Everything in the text that reads as an object or a list: where it begins, where it ends, what it is."""
    left = MOST_READ * len(text)
    for _ in range(MOST_OBJECTS):
        if left < 0:
            return
        bracket = _BRACKET.search(text, at)
        effort.spend((bracket.start() if bracket else len(text)) - at)
        if bracket is None:
            return
        at = bracket.start()
        try:
            value, end = _decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            read = error.pos - at if isinstance(error, json.JSONDecodeError) else 0
            left -= read
            # The error counts the lines before it.
            effort.spend(read + (at + read) // 8)
            at += 1
            continue
        left -= end - at
        effort.spend(end - at)
        yield at, end, value
        at += 1


def _is_call(value: Any, call: Call, effort: Effort) -> bool:
    """Whether an object of the text is this call, and nothing else is in it."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict) and value.keys() <= {*_FIELDS, "function"}:
        value = value["function"]
    if not isinstance(value, dict) or not value.keys() <= _FIELDS or value.get("name") != call[0]:
        return False
    given = [value[key] for key in ("arguments", "parameters") if key in value]
    if len(given) > 1:
        return False
    effort.spend(len(call[1]))
    try:
        return _same(given[0] if given else {}, json.loads(call[1]) if call[1].strip() else {})
    except (ValueError, RecursionError):
        return False


def _same(one: Any, two: Any) -> bool:
    """Equality of JSON, in which `true` is not 1."""
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same(value, two[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_same, one, two))
    return isinstance(one, bool) is isinstance(two, bool) and bool(one == two)


def _tagged(name: str, arguments: dict[str, Any], text: str, at: int, effort: Effort) -> Span | None:
    """Where tags hold the name and then every argument, key directly before value, in their order."""
    for head in re.compile(rf"(?=<[^<>]*(?:{_KIND})){_HEAD}{re.escape(name)}(?![\w.-])\"?>?").finditer(text, at):
        effort.spend(head.end() - at)
        at = head.end()
        end: int | None = at
        for key, value in arguments.items():
            end = _argument(key, value, text, end, effort) if end is not None else None
            if end is None:
                break
        if end is not None:
            return head.start(), end
    effort.spend(len(text) - at)
    return None


def _argument(key: str, value: Any, text: str, at: int, effort: Effort) -> int | None:
    """Where the argument ends that begins at `at`."""
    effort.spend(_COMPILED + _PER_LETTER * len(key) + (len(value) // 8 if isinstance(value, str) else 0))
    found = re.compile(rf"\s*{_HEAD}{re.escape(key)}(?![\w.-])").match(text, at)
    opened = _TO_VALUE.match(text, found.end()) if found else None
    if opened is None:
        return None
    at = opened.end()
    if isinstance(value, str) and text.startswith(value.strip(), at):
        closed = _CLOSED.match(text, at + len(value.strip()))
        return closed.end() if closed else None
    closed = _CLOSING.search(text, at)
    effort.spend((closed.end() if closed else len(text)) - at)
    if isinstance(value, str) or closed is None:
        return None
    written = text[at : closed.start()].strip()
    try:
        read = json.loads({"True": "true", "False": "false", "None": "null"}.get(written, written))
    except (ValueError, RecursionError):
        return None
    return closed.end() if _same(read, value) else None


def _broken(call: Call, text: str, at: int) -> tuple[Span, int] | None:
    """Where a call stands that the answer's end cut off: as far as it is shown, and all that the text has after it."""
    name, arguments = call[0], call[1].lstrip()
    if len(name) > LONGEST_LEAD:
        return None
    head = rf"\{{\s*\"name\"\s*:\s*{re.escape(json.dumps(name, ensure_ascii=False))}\s*"
    begun = re.compile(rf"{head}(?:,\s*\"(?:arguments|parameters)\"\s*:\s*)?")
    for found in islice(begun.finditer(text, at), MOST_OBJECTS):
        if not text.startswith(arguments, found.end()):
            continue
        # Whatever closes a call or begins another would have been shown.
        rest = found.end() + len(arguments)
        return None if _OPENED.search(text, rest) else ((found.start(), len(text)), 1)
    return None
