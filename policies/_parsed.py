"""Is a parsed answer made of pieces of the text its ids spell?

Parsers cut the text: markup goes, one part becomes reasoning, another content, others tool calls. They add no words,
drop none and swap none: whoever may leave out a word, or put one argument in another's place, can make a text say
anything. So every character of the text must be accounted for. Reasoning is one stretch, at a tag that tells it from
content; each call is a stretch in which it stands, name and arguments (`policies._called`); content is the rest, cut
only by those and by added tokens; and what is then left is markup. There are formats that this does not know; their
answers are undecided, never accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from policies._called import spans
from policies._effort import Effort, TooMuchError
from policies.evidence import Evidence
from policies.thinking import CLOSING, OPENING

MOST_PIECES = 4
"""Pieces of the text that content may be put together from, besides one more for each call."""
MOST_PLACES = 8
"""Places at which reasoning is looked for, where its words stand in a text more than once."""
LONGEST_TAG = 256
"""Characters before a call in which its tag stands."""
_TAKEN, _MARK = "\0", "\1"
_CHANNEL = re.compile(r"(?:analysis|commentary|final|assistant)\s*\Z")
"""What harmony's templates write between two special tokens."""
_SAYS = re.compile(r"Here(?: i|')s my (?:thought process|response):")
"""What Granite writes in place of tags."""
_CALL = re.compile(r"tool|func|call|python|plugin|channel|start", re.IGNORECASE)
"""What a tag says behind which a call stands."""
_GLUE_MARKS = " \t\r\n;,"
"""What may stand between calls besides markup."""
_BEGUN = re.compile(r"<(?:/?[\w:|]{0,40}|[\w:|]{0,40}>[^<\0]*)$")
"""A call that a limit or a stop string cut off at its beginning, which streams hold back until there is more of it."""


@dataclass(frozen=True, slots=True)
class Markup:
    """What parsers take out besides their own words.

    Attributes:
        all: added tokens and tags.
        added: added tokens; None where the tokenizer has none.
        opened: the prompt ends inside reasoning.
    """

    all: re.Pattern[str]
    added: re.Pattern[str] | None
    opened: bool = False


def made_of(evidence: Evidence, text: str, markup: Markup, *, finished: bool, named: str = "") -> bool:
    """Whether content, reasoning and every tool call come from `text`, and nothing of it is gone but markup.

    Args:
        finished: the answer is whole; otherwise its end may be missing.
        named: the function that the request forces a call of, whose name need not be in the text.
    """
    effort = Effort(len(text) + len(evidence.text))
    try:
        return _made_of(evidence, text, markup, effort, finished=finished, named=named)
    except TooMuchError:
        return False


def _made_of(evidence: Evidence, text: str, markup: Markup, effort: Effort, *, finished: bool, named: str) -> bool:
    cut = evidence.finish_reason == "length" or isinstance(evidence.stop_reason, str) or not finished
    for rest in _without_reasoning(evidence.reasoning, text, markup):
        found = spans(evidence.tool_calls, rest, effort=effort, named=named, cut=cut)
        if found is None:
            continue
        alone = not evidence.text.strip()
        parts: list[str] = []
        at = 0
        for start, end in found:
            before = _TAKEN * bool(parts) + rest[at:start]
            if not _is_announced(before[-LONGEST_TAG:], rest[start], markup, alone=alone):
                break
            parts += [rest[at:start], _TAKEN * (end - start)]
            at = end
        if len(parts) < 2 * len(found):
            continue
        rest = "".join([*parts, rest[at:]])
        # A piece that looks like a bit of markup is no bit of it, as long as there is another place for it.
        bare = markup.all.sub(lambda found: _MARK * len(found[0]), rest)
        most = MOST_PIECES + len(evidence.tool_calls)
        for marked in (bare, rest):
            tail = _without_content(evidence.text, marked, rest, markup, most, effort)
            if tail is None:
                continue
            if not finished or _is_markup(_BEGUN.sub("", tail) if cut else tail, markup):
                return True
    return False


def _without_reasoning(reasoning: str, text: str, markup: Markup) -> Iterator[str]:
    """The text without its reasoning, for each place at which that may stand."""
    reasoning = reasoning.strip()
    if not reasoning:
        yield text
        return
    if any(CLOSING.search(mark[0]) for mark in markup.all.finditer(reasoning)):
        return
    at = -1
    for _ in range(MOST_PLACES):
        at = text.find(reasoning, at + 1)
        if at < 0:
            return
        end = at + len(reasoning)
        if _is_reasoning(text[:at], text[end:], markup):
            yield text[:at] + _TAKEN * len(reasoning) + text[end:]


def _is_reasoning(before: str, after: str, markup: Markup) -> bool:
    """Whether a tag tells that what stands between is reasoning, and all of it."""
    before, after = before.rstrip()[-LONGEST_TAG:], after.lstrip()
    if not before:
        begins = markup.opened
    else:
        begins = _opens(before, markup)
        if not begins:
            return False
    ends = markup.all.match(after)
    tag = ends[0] if ends is not None else ""
    if CLOSING.search(tag):
        return True
    parted = bool(tag) and (_CALL.search(tag) or (markup.added is not None and markup.added.fullmatch(tag)))
    return begins and (not after or bool(parted) or _SAYS.match(after) is not None)


def _opens(before: str, markup: Markup) -> bool:
    """Whether reasoning begins where this text ends."""
    marks = [mark for mark in markup.all.finditer(before) if mark.end() == len(before)]
    if not marks:
        return re.search(_SAYS.pattern + r"\Z", before) is not None
    if OPENING.search(marks[0][0]) and not CLOSING.search(marks[0][0]):
        return True
    return before[: marks[0].start()].rstrip().endswith("analysis")


def _is_announced(before: str, first: str, markup: Markup, *, alone: bool) -> bool:
    """Whether a call stands where parsers look for one, and is no example amid content: at a tag, after another call,
    or with no content at all."""
    if alone or first == "<" or before.rstrip(_GLUE_MARKS).endswith(_TAKEN):
        return True
    before = before.rstrip(" \t\r\n[")
    tag = next((mark[0] for mark in markup.all.finditer(before) if mark.end() == len(before)), "")
    return bool(_CALL.search(tag))


def _without_content(content: str, marked: str, rest: str, markup: Markup, most: int, effort: Effort) -> str | None:
    """What follows the last piece of the content; None where it is not made of the text's pieces, in their order."""
    at, content = 0, content.strip()
    for piece in range(most):
        if not content:
            break
        start, length = _longest(content, marked, at, effort)
        if not length:
            return None
        gap = rest[at:start]
        if not _is_markup(gap, markup) or (piece and not _parts(gap, markup)):
            return None
        at = start + length
        content = content[length:].lstrip()
    return None if content else rest[at:]


def _parts(gap: str, markup: Markup) -> bool:
    """Whether parsers may have cut the content here: a call or reasoning stood here, or an added token."""
    if _TAKEN in gap:
        return True
    return bool(markup.added and gap.strip() and not markup.added.sub("", gap).strip())


def _is_markup(text: str, markup: Markup) -> bool:
    """Whether nothing but markup, white space and what was taken already is in it. Tags of other names than those of
    reasoning are markup only around what was taken: elsewhere they are the model's words."""
    text = _SAYS.sub("", text)
    between, at = [], 0
    parsed = _TAKEN in text
    for mark in markup.all.finditer(text):
        if not (parsed or OPENING.search(mark[0]) or (markup.added and markup.added.fullmatch(mark[0]))):
            return False
        between.append(_CHANNEL.sub("", text[at : mark.start()]))
        at = mark.end()
    left = "".join([*between, text[at:]])
    first, *between = left.split(_TAKEN)
    last = between.pop() if between else ""
    return not first.strip() and not last.strip() and not "".join(between).strip(_GLUE_MARKS)


def _longest(rest: str, text: str, at: int, effort: Effort) -> tuple[int, int]:
    """Where after `at` the longest beginning of `rest` stands, and how long it is."""
    work = (len(text) - at + len(rest)) // 8
    effort.spend(work)
    start, low, high = text.find(rest, at), 0, len(rest)
    if start >= 0:
        return start, high
    while high - low > 1:
        effort.spend(work)
        middle = (low + high) // 2
        found = text.find(rest[:middle], at)
        if found >= 0:
            start, low = found, middle
        else:
            high = middle
    return start, low
