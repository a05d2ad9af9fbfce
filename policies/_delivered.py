"""Is the text the client was shown the one its token ids spell?

Null hypothesis: vLLM's own detokeniser turned these ids into that text. A plain answer is then equal to it character
for character, so a mismatch is exact. What vLLM does, and this repeats: ids come one by one after the prompt's; half a
character adds nothing until it is whole, and is lost at the end; special tokens are left out unless the request wants
them; the stop token's text is left out unless `include_stop_str_in_output`; the text is searched for stop strings once
more than `min_tokens` tokens are out, ends before (or after) the one that is complete first, and no token follows.

Parsers of reasoning and tool calls move and drop pieces of the text, in ways that depend on the server's flags. Where
they left nothing but content, only markup (added tokens, tags) and white space at the edges may be gone. Where they
took out reasoning or tool calls, every character of the text must be accounted for (`policies._parsed`). A parsed
answer that is not made so is undecided, never accepted and never an accusation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from policies import _parsed
from policies._findings import Finding, rejected, undecided
from policies._request import read
from policies.evidence import WITHHELD_FAULTS, Evidence, Ids
from policies.spelling import Spelling
from policies.thinking import tags_of

_OFF = (False, 0, "0", "false", "f", "no", "n", "off")
_HALF = "\ufffd"
MOST_MARKS = 256
"""Pieces of markup at which a text is tried to begin."""
_TAG = re.compile(r"</?[\w:|-]{1,40}/?>")
_THOUGHT = re.compile(r"</?[\w:|-]{0,30}think[\w:|-]{0,10}>", re.IGNORECASE)


class Asked(msgspec.Struct):
    """Fields of the request that decide what of the text is shown, as JSON had them."""

    skip_special_tokens: Any = True
    spaces_between_special_tokens: Any = True
    include_reasoning: Any = True
    echo: Any = None
    tools: Any = None
    tool_choice: Any = None

    @property
    def calls(self) -> bool:
        """Whether tool calls may be parsed out of the text."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forced(self) -> str:
        """The function that the request forces a call of."""
        function = self.tool_choice.get("function") if isinstance(self.tool_choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        return name if isinstance(name, str) else ""


_asked = msgspec.json.Decoder(Asked)


@dataclass(frozen=True, slots=True)
class Reading:
    """What ids spell: the text, tokens used up when it ended, and the stop string that ended it."""

    text: str
    used: int
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Delivered:
    """Findings, and whether text and ids were compared at all."""

    findings: tuple[Finding, ...] = ()
    compared: bool = False


def check(evidence: Evidence, spelling: Spelling, stops: frozenset[int], *, known: bool) -> Delivered:
    """Holds the shown text against the ids.

    Args:
        stops: ids that end this answer.
        known: whether these are all of them.
    """
    asked = read(evidence.request, _asked)
    if asked is None or asked.echo or WITHHELD_FAULTS.intersection(evidence.faults) or not len(evidence.output_ids):
        return Delivered()
    variants = list(_variants(evidence, asked, stops, known))
    parsed = bool(evidence.reasoning or evidence.tool_calls)
    if not parsed:
        for variant in variants:
            reading = variant.quick(spelling)
            if reading is not None and _equal(evidence, reading):
                return Delivered(tuple(_end_findings(evidence, reading, stops, known)), compared=True)
    readings = _readings(variants, spelling)
    if not readings:
        return Delivered((undecided("text_undecided", "too many ids in a row make no character"),))
    if not parsed:
        matching = [reading for reading in readings if _equal(evidence, reading)]
        if not matching and evidence.endpoint == "chat":
            matching = [reading for reading in readings if _same_but_markup(evidence, reading.text, spelling)]
        if matching:
            found = [_end_findings(evidence, reading, stops, known) for reading in matching]
            fewest = min(found, key=lambda findings: len(findings))
            return Delivered(tuple(fewest), compared=True)
        if not _may_be_parsed(evidence, asked) and not _cut_at_markup(evidence, readings, spelling):
            return Delivered((rejected("text_mismatch", _difference(evidence, readings[0])),), compared=True)
    added = _added(spelling)
    opened = tags_of(spelling).open_after(evidence.prompt_ids)
    markup = _parsed.Markup(_markup(spelling), re.compile(added) if added else None, opened)
    for text in dict.fromkeys(reading.text for reading in readings):
        if _parsed.made_of(evidence, text, markup, finished=_finished(evidence), named=asked.forced):
            return Delivered(compared=True)
    return Delivered((undecided("text_undecided", "the parsed answer is not made of pieces of its ids' text"),))


def _may_be_parsed(evidence: Evidence, asked: Asked) -> bool:
    return evidence.endpoint == "chat" and (asked.calls or asked.include_reasoning in _OFF)


@dataclass(frozen=True, slots=True)
class _Variant:
    """One way the server may have been set to detokenise."""

    evidence: Evidence
    ids: Ids
    skip: bool
    spaced: bool

    def quick(self, spelling: Spelling) -> Reading | None:
        """The text in one call, where it is certain to be what single steps give and no stop string is in it."""
        if not (self.skip or self.spaced):
            return None
        text = spelling.decode(self.ids, skip_special_tokens=self.skip)
        if text.endswith(_HALF) or any(stop in text for stop in self.evidence.sampling.stop):
            return None
        return Reading(text, len(self.evidence.output_ids))

    def thorough(self, steps: list[str], spelling: Spelling) -> Reading:
        """The text token by token, by what each of the answer's ids adds to it, with its stop strings."""
        steps = steps[: len(self.ids)]
        if not (self.skip or self.spaced):
            steps = _unspaced(self.ids, steps, spelling)
        return _stopped(steps, self.evidence)


def _variants(evidence: Evidence, asked: Asked, stops: frozenset[int], known: bool) -> Iterator[_Variant]:
    sampling, ids = evidence.sampling, evidence.output_ids
    skip = asked.skip_special_tokens not in _OFF
    spaced = asked.spaces_between_special_tokens not in _OFF
    ends = int(ids[-1]) in stops and len(ids) > sampling.min_tokens and evidence.finish_reason != "length"
    cuts = [ids[:-1]] if ends and not sampling.include_stop_str_in_output else [ids]
    # Where a grammar leaves nothing but what `min_tokens` forbids, a stop token may come all the same.
    blank = sampling.grammar and int(ids[-1]) in stops and len(ids) <= sampling.min_tokens
    if not ends and (blank or not known):
        cuts.append(ids[:-1])
    # Parsers ask for the special tokens they look for.
    skips = [skip, False] if skip and evidence.endpoint == "chat" else [skip]
    for each in skips:
        for cut in cuts:
            yield _Variant(evidence, cut, each, spaced)


def _readings(variants: list[_Variant], spelling: Spelling) -> list[Reading]:
    """What the ids spell in each way; nothing where one of the ways cannot be told."""
    evidence = variants[0].evidence
    steps = {}
    for skip in {variant.skip for variant in variants}:
        found = spelling.steps(evidence.output_ids, context=evidence.prompt_ids, skip_special_tokens=skip)
        if found is None:
            return []
        steps[skip] = found
    return [variant.thorough(steps[variant.skip], spelling) for variant in variants]


def _unspaced(ids: Ids, steps: list[str], spelling: Spelling) -> list[str]:
    """An added token right after another adds its bare text."""
    added = spelling.added
    after = False
    texts = []
    for id, text in zip(ids.tolist(), steps, strict=True):
        texts.append(added[id] if after and id in added else text)
        after = id in added
    return texts


def _stopped(steps: list[str], evidence: Evidence) -> Reading:
    sampling = evidence.sampling
    text = "".join(steps)
    best: tuple[int, int, int, str] | None = None
    if sampling.stop:
        ends = np.cumsum(np.fromiter(map(len, steps), np.int64, len(steps)))
        # Text that was out before stop strings counted is searched no more.
        first = int(ends[sampling.min_tokens - 1]) if 0 < sampling.min_tokens <= len(ends) else 0
        if sampling.min_tokens >= len(steps):
            return Reading(text, len(evidence.output_ids))
        for stop in filter(None, sampling.stop):
            start = text.find(stop, max(0, first + 1 - len(stop)))
            if start >= 0:
                end = start + len(stop)
                found = (int(np.searchsorted(ends, end)), end, start, stop)
                best = found if best is None or found[:2] < best[:2] else best
    if best is None:
        return Reading(text, len(evidence.output_ids))
    token, end, start, stop = best
    return Reading(text[: end if sampling.include_stop_str_in_output else start], token + 1, stop)


def _equal(evidence: Evidence, reading: Reading) -> bool:
    if not _finished(evidence):
        return reading.text.startswith(evidence.text)
    return evidence.text == reading.text


def _finished(evidence: Evidence) -> bool:
    return evidence.complete and not evidence.faults and evidence.finish_reason != "abort"


def _same_but_markup(evidence: Evidence, spelled: str, spelling: Spelling) -> bool:
    """Whether nothing but added tokens, tags of reasoning around the whole, and white space at the edges is gone."""
    added = _added(spelling)
    # White space is taken from where it begins: from each blank of a long run anew would take quadratic time.
    markup = re.compile(rf"(?:(?<!\s)\s+|)(?:{added})\s*") if added else None
    bare, rest = (markup.sub("", text).strip() if markup else text.strip() for text in (evidence.text, spelled))
    if bare == rest or (not _finished(evidence) and rest.startswith(bare)):
        return True
    at = rest.find(bare) if bare else -1
    return at >= 0 and not _THOUGHT.sub("", rest[:at] + rest[at + len(bare) :]).strip()


def _cut_at_markup(evidence: Evidence, readings: list[Reading], spelling: Spelling) -> bool:
    """Whether the text is what stands between two pieces of markup, or one and an end. Parsers of reasoning drop what
    comes before the tag that begins it, and where nothing is in it show no reasoning either."""
    bare, markup = evidence.text.strip(), _markup(spelling).pattern
    if evidence.endpoint != "chat" or not bare:
        return False
    before, after = re.compile(rf"(?:{markup})\s*"), re.compile(rf"\s*(?:{markup}|\Z)")
    for reading in readings:
        text = reading.text
        begins = [len(text) - len(text.lstrip()), *(mark.end() for mark in islice(before.finditer(text), MOST_MARKS))]
        if any(text.startswith(bare, at) and after.match(text, at + len(bare)) for at in begins):
            return True
    return False


def _markup(spelling: Spelling) -> re.Pattern[str]:
    added = _added(spelling)
    return re.compile(f"{added}|{_TAG.pattern}") if added else _TAG


def _added(spelling: Spelling) -> str:
    """A pattern of all added tokens, the longest first."""
    return "|".join(map(re.escape, sorted(filter(None, spelling.added.values()), key=len, reverse=True)))


def _end_findings(evidence: Evidence, reading: Reading, stops: frozenset[int], known: bool) -> list[Finding]:
    """What the text says about where the answer had to end."""
    tokens = len(evidence.output_ids)
    if reading.used < tokens:
        text = f"token {reading.used - 1} completes a stop string, yet {tokens - reading.used} tokens follow"
        return [rejected("tokens_after_stop", text)]
    decided = _finished(evidence) and known and evidence.finish_reason == "stop" and not evidence.sampling.grammar
    if decided and evidence.sampling.stop and reading.stop is None and int(evidence.output_ids[-1]) not in stops:
        return [rejected("finish_mismatch", "finished by stop, yet neither a stop string nor a stop token is there")]
    return []


def _difference(evidence: Evidence, reading: Reading) -> str:
    """Where they part, without a word of either."""
    one, two = evidence.text, reading.text
    length = min(len(one), len(two))
    at = next((at for at in range(length) if one[at] != two[at]), length)
    return f"the text of {len(one)} characters leaves the {len(two)} its ids spell at character {at}"
