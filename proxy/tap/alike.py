"""Chunks of a stream that are like one before them, and differ only in what they say and claim.

Nearly all of an answer is such chunks. Of them the client sees the same as of that one, with other text in it: which is
told by comparing bytes and reading the claim, once, where any other chunk is taken apart and put together again.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from policies.evidence import Endpoint
from proxy.tap.allowed import Allowed
from proxy.tap.rawjson import UNREADABLE, Object, is_null, raw, read_object, read_objects, write
from proxy.tap.together import Chunk, read_one

_MOST = 16 * 1024
"""Bytes of a chunk that is read at once."""
_BLANK = b"\n\n"
_STRING = re.compile(rb'"(?:[^"\\\x00-\x1f]|\\.)*"')
_IDS = re.compile(rb"\[\d{1,10}(?:,\d{1,10})*\]")
_OPENERS: dict[Endpoint, bytes] = {"chat": b'"delta":{"content":', "completions": b'"text":'}
_TOP = frozenset({"id", "object", "created", "model", "choices", "system_fingerprint"})
_index = msgspec.json.Decoder(int)


class Said(NamedTuple):
    """One such chunk: what is read of it, and the event for the client."""

    chunk: Chunk
    shown: bytes


class Alike:
    """What such chunks have in common; `index` is that of their choice.

    Args:
        endpoint: whose chunks they are.
        index: of the choice.
        around: bytes of the backend's event before the text, between text and claim, between claim and ids, and after
            the ids.
        shown: bytes of the client's event before and after the text.
        allowed: bounds of the answer.
    """

    __slots__ = ("_after", "_between", "_depth", "_endpoint", "_head", "_ids", "_most", "_shown", "_tail", "index")

    def __init__(
        self,
        endpoint: Endpoint,
        index: int,
        around: tuple[bytes, bytes, bytes, bytes],
        shown: tuple[bytes, bytes],
        allowed: Allowed,
    ) -> None:
        self.index = index
        self._endpoint = endpoint
        self._head, self._between, self._ids, self._tail = around
        self._shown, self._after = shown
        # Where there are more brackets, they may stand too deep.
        self._depth = allowed.depth
        self._most = min(_MOST, allowed.line) - len(_BLANK)

    @classmethod
    def learn(cls, endpoint: Endpoint, data: bytes, shown: bytes, allowed: Allowed) -> Alike | None:
        """What chunks have in common with this one, where they can be told.

        Args:
            data: of an event of one data line.
            shown: the event as the client gets it; of text, claim and ids it shows the text alone, as it came.
        """
        top = read_object(data)
        choices = read_objects(top["choices"]) if top is not None and "choices" in top else None
        if top is None or choices is None or len(choices) != 1 or not _nothing_else(top, _TOP):
            return None
        choice, opener = choices[0], _OPENERS[endpoint]
        said, named = _text(endpoint, choice)
        logprobs, ids = (bytes(choice.get(name, b"")) for name in ("logprobs", "token_ids"))
        if said is None or not _nothing_else(choice, named) or write({**top, "choices": raw(choices)}) != data:
            return None
        at, shown_at = data.find(opener) + len(opener), shown.find(opener) + len(opener)
        claim_at = data.find(logprobs, at + len(said))
        ids_at = data.find(ids, claim_at + len(logprobs))
        end, shown_end = at + len(said), shown_at + len(said)
        if not (data[at:end] == shown[shown_at:shown_end] == said and end < claim_at < ids_at):
            return None
        between, before_ids = data[end:claim_at], data[claim_at + len(logprobs) : ids_at]
        if not (between.endswith(b'"logprobs":') and before_ids.endswith(b'"token_ids":')):
            return None
        around = (b"data: " + data[:at], between, before_ids, data[ids_at + len(ids) :])
        index = _place(choice)
        if index is None:
            return None
        return cls(endpoint, index, around, (shown[:shown_at], shown[shown_end:]), allowed)

    def read(self, event: bytes) -> Said | None:
        """An event (without its blank line) as one of them; None where it is not."""
        if len(event) > self._most or not event.startswith(self._head) or not event.endswith(self._tail):
            return None
        text = _STRING.match(event, len(self._head))
        if text is None:
            return None
        end = text.end()
        claim_at, ids_at = end + len(self._between), event.rfind(self._ids)
        if ids_at < claim_at or not event.startswith(self._between, end):
            return None
        ids = event[ids_at + len(self._ids) : len(event) - len(self._tail)]
        if event.count(b"{") + event.count(b"[") > self._depth or _IDS.fullmatch(ids) is None:
            return None
        said = text[0]
        try:
            chunk = read_one(self._endpoint, said, ids, event[claim_at:ids_at])
        except UNREADABLE:
            return None
        if chunk.logprobs is None:
            return None
        return Said(chunk, b"%b%b%b" % (self._shown, said, self._after))


def _text(endpoint: Endpoint, choice: Object) -> tuple[bytes | None, frozenset[str]]:
    """A choice's text as it is spelled, None where it is not all that it shows; and the fields that are looked at."""
    said: Any = choice.get("text")
    names = frozenset({"index", "text", "logprobs", "token_ids"})
    if endpoint == "chat":
        delta = read_object(choice["delta"]) if "delta" in choice else None
        if delta is None or not _nothing_else(delta, frozenset({"content"})) or write(delta) != bytes(choice["delta"]):
            return None, names
        said = delta.get("content")
        names = frozenset({"index", "delta", "logprobs", "token_ids"})
    return (None if said is None or _STRING.fullmatch(said) is None else bytes(said)), names


def _place(choice: Object) -> int | None:
    """A choice's index, 0 where it has none; None where it is no place of a choice."""
    if "index" not in choice:
        return 0
    try:
        index = _index.decode(choice["index"])
    except UNREADABLE:
        return None
    return index if index >= 0 else None


def _nothing_else(fields: Object, names: frozenset[str]) -> bool:
    others = [value for name, value in fields.items() if name not in names]
    return not others or all(map(is_null, others))
