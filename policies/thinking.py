"""The tags around a model's reasoning, and which tokens a `thinking_token_budget` can have forced.

vLLM 0.32 counts the tokens after the latest opening of reasoning, in prompt or answer. Where a request's budget is
reached, it raises the logit of one token after another, until the reasoning is ended: the closing tag alone, or after
words that the server was given (`--reasoning-config`). Nothing else is forced, and nothing at another place. The first
forced token is the one that comes when exactly `budget` tokens have been counted, or the answer's first where the
prompt holds as many.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies._request import extras
from policies.evidence import Evidence, Ids
from policies.spelling import Spelling

FORCED_TOKENS = 32
"""Tokens, at most, by which a server ends reasoning that is over its budget."""
CLOSING = re.compile(r"/[\w:]*think|think\w*\W*end|end\W*\w*think", re.IGNORECASE)
OPENING = re.compile(r"think", re.IGNORECASE)
"""Of what is not closing."""
_NONE = re.compile(r"no[_-]?think", re.IGNORECASE)
_LARGEST = 2**31 - 1

_Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Tags:
    """Added tokens that open and close reasoning; none where they are not known."""

    opening: frozenset[int] = frozenset()
    closing: frozenset[int] = frozenset()

    @classmethod
    def of(cls, added: Mapping[int, str]) -> Tags:
        """Those of a tokenizer, by their text."""
        closing = frozenset(id for id, text in added.items() if CLOSING.search(text))
        opening = {id for id, text in added.items() if OPENING.search(text) and not _NONE.search(text)}
        return cls(frozenset(opening - closing), closing)

    def open_after(self, prompt: Ids) -> bool:
        """Whether a prompt ends inside reasoning."""
        opened, closed = _places(prompt, self.opening), _places(prompt, self.closing)
        return bool(len(opened)) and (not len(closed) or bool(opened[-1] > closed[-1]))


UNKNOWN = Tags()


def tags_of(spelling: Spelling | None) -> Tags:
    """Those of a model's tokenizer, where it is declared."""
    return UNKNOWN if spelling is None else Tags.of(spelling.added)


@dataclass(frozen=True, slots=True)
class Forced:
    """What a budget did to the tokens of an answer; bool (G,) each.

    Attributes:
        surely: a closing tag at the very place where the budget runs out.
        maybe: other tokens that may have been forced: those from there to the tag that closes the reasoning soon
            after, or to the end of an answer that breaks off soon after; without tags, all that the count allows.
        anywhere: the tags are not known, and `maybe` is no more than a bound.
    """

    surely: _Flags
    maybe: _Flags
    anywhere: bool = False

    def any(self) -> bool:
        """Whether any token may have been forced."""
        return bool(self.surely.any() or self.maybe.any())


def forced(evidence: Evidence, tags: Tags) -> Forced:
    """Which tokens the request's budget may have forced."""
    tokens, prompt = len(evidence.output_ids), len(evidence.prompt_ids)
    surely, maybe = np.zeros(tokens, np.bool_), np.zeros(tokens, np.bool_)
    budget = _budget(evidence)
    if budget is None:
        return Forced(surely, maybe)
    if not (tags.opening and tags.closing):
        # At least one token opened the reasoning, unless the prompt is not known.
        maybe[max(0, budget + 1 - prompt) if prompt else 0 :] = True
        return Forced(surely, maybe, anywhere=True)
    ids = np.concatenate([evidence.prompt_ids, evidence.output_ids])
    opened, closed = _places(ids, tags.opening), _places(ids, tags.closing)
    starts = np.maximum(prompt, opened + 1 + budget)
    ends = np.append(closed, len(ids))[np.searchsorted(closed, opened)]
    near = (starts <= ends) & (starts < len(ids)) & (ends - starts < FORCED_TOKENS)
    for start, end in zip((starts[near] - prompt).tolist(), (ends[near] - prompt).tolist(), strict=True):
        if start == end:
            surely[start] = True
        else:
            maybe[start : end + 1] = True
    return Forced(surely, maybe & ~surely)


def _budget(evidence: Evidence) -> int | None:
    """The budget in tokens; None where the request sets none. vLLM takes −1 for none and refuses what is no integer."""
    budget = extras(evidence).thinking_token_budget
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 0:
        return None
    return min(budget, _LARGEST)


def _places(ids: Ids, tags: frozenset[int]) -> NDArray[np.intp]:
    return np.flatnonzero(np.isin(ids, list(tags)))
