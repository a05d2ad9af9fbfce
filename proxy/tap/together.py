"""Chunks of a stream read together, one call of the parser for all of them: what is read by itself, after milliseconds
in which the processor did something else, costs several times as much.

Only what is as engines write it is read here. Where anything is not, nothing is, and each chunk is read by itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from policies.evidence import Endpoint
from policies.message import KNOWN, Message, Place, Shown, of_message, place_of
from proxy.tap.claim import ROOM, Row, Rows, SmallChat, SmallCompletions, token_ids
from proxy.tap.rawjson import NULL, Object
from proxy.tap.repeats import any_repeats


class ChatChunk(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Of chat."""

    said: Message
    ids: list[int] | None
    logprobs: SmallChat | None


class TextChunk(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Of completions."""

    said: str
    ids: list[int] | None
    logprobs: SmallCompletions | None


Chunk = ChatChunk | TextChunk
"""What is read of one choice of a chunk."""


class Part(NamedTuple):
    """What one choice of a chunk says; None for what is absent or null."""

    said: Shown
    ids: array[int] | None
    claim: Rows | None


_chat = msgspec.json.Decoder(list[ChatChunk])
_text = msgspec.json.Decoder(list[TextChunk])
_one_chat = msgspec.json.Decoder(ChatChunk)
_one_text = msgspec.json.Decoder(TextChunk)


def read_together(endpoint: Endpoint, choices: Sequence[Object]) -> list[Part] | None:
    """What choices of a stream's chunks say, in their order; None where one of them is not as engines write it."""
    place = place_of(endpoint, whole=False)
    try:
        three = [_three(choice, place) for choice in choices]
        if endpoint == "chat" and any_repeats([said for said, _, _ in three]):
            return None
        text = b"],[".join([b",".join(each) for each in three])
        chunks: list[Any] = (_chat if endpoint == "chat" else _text).decode(b"[[%b]]" % text)
        return _parts(endpoint, chunks)
    except Exception:
        # Whatever it is: each by itself shows whose it is.
        return None


def read_one(endpoint: Endpoint, said: bytes, ids: bytes, logprobs: bytes) -> Chunk:
    """A chunk of which these are the text, the ids and the claim, as they are spelled. Raises what UNREADABLE says."""
    if endpoint == "chat":
        return _one_chat.decode(b'[{"content":%b},%b,%b]' % (said, ids, logprobs))
    return _one_text.decode(b"[%b,%b,%b]" % (said, ids, logprobs))


def as_one(chunks: Sequence[Chunk]) -> Part | None:
    """What chunks of one choice, of `read_one`, say together; None where one of them has another number of rows than of
    ids, or one that cannot be taken as it is."""
    try:
        ids = array("i", [id for chunk in chunks for id in chunk.ids or ()])
        sizes, tokens, values = _columns(chunks)
        if [len(chunk.ids or ()) for chunk in chunks] != [len(found) for found in sizes]:
            return None
        counts = array("i", chain.from_iterable(sizes))
        claimed = array("i", token_ids(tokens))
        if not (0 < min(counts) <= max(counts) <= ROOM and min(ids) >= 0 and min(claimed) >= 0):
            return None
        return Part(Shown("".join(map(_said, chunks))), ids, Rows(claimed, array("f", values), counts))
    except (ValueError, OverflowError):
        return None


def _said(chunk: Chunk) -> str:
    return chunk.said if isinstance(chunk, TextChunk) else chunk.said.content or ""


def _columns(chunks: Sequence[Any]) -> tuple[list[list[int]], list[str], list[float]]:
    """Entries of each row of each chunk, and all of their tokens and values. Raises ValueError."""
    claims = [chunk.logprobs for chunk in chunks]
    if isinstance(claims[0], SmallChat):
        rows = [entry for claim in claims for entry in claim.content]
        sizes = [[1 + len(entry.top_logprobs) for entry in claim.content] for claim in claims]
        entries = [each for row in rows for each in (row, *row.top_logprobs)]
        return sizes, [each.token for each in entries], [each.logprob for each in entries]
    every = [
        row for claim in claims for row in zip(claim.tokens, claim.token_logprobs, claim.top_logprobs, strict=True)
    ]
    tokens = [name for token, _, top in every for name in (token, *top)]
    values = [each for _, value, top in every for each in (value, *top.values())]
    return [[1 + len(top) for top in claim.top_logprobs] for claim in claims], tokens, values


def _three(choice: Object, place: Place) -> tuple[Raw, Raw, Raw]:
    if not choice.keys() <= KNOWN[place]:
        raise ValueError("more than engines write")
    return choice[place], choice.get("token_ids", NULL), choice.get("logprobs", NULL)


def _parts(endpoint: Endpoint, chunks: Sequence[Any]) -> list[Part]:
    """Raises ValueError and OverflowError where a row, or an id, cannot be taken as it is."""
    rows = [None if chunk.logprobs is None else _rows(endpoint, chunk.logprobs) for chunk in chunks]
    every = [row for found in rows if found is not None for row in found]
    sizes = array("i", [len(tokens) for tokens, _ in every])
    if every and not 0 < max(sizes) <= ROOM:
        raise ValueError("a row too long")
    ids = array("i", token_ids(list(chain.from_iterable([tokens for tokens, _ in every]))))
    values = array("f", list(chain.from_iterable([values for _, values in every])))
    output = [None if chunk.ids is None else array("i", chunk.ids) for chunk in chunks]
    if (ids and min(ids) < 0) or any(own and min(own) < 0 for own in output):
        raise ValueError("a negative id")
    parts, at, first = [], 0, 0
    for chunk, own, found in zip(chunks, output, rows, strict=True):
        claim = None
        if found is not None:
            counts = sizes[first : first + len(found)]
            end = at + sum(counts)
            claim = Rows(ids[at:end], values[at:end], counts)
            at, first = end, first + len(found)
        parts.append(Part(of_message(chunk.said, "delta") if endpoint == "chat" else Shown(chunk.said), own, claim))
    return parts


def _rows(endpoint: Endpoint, logprobs: Any) -> list[Row]:
    if endpoint == "chat":
        return [
            (
                [entry.token, *[top.token for top in entry.top_logprobs]],
                [entry.logprob, *[top.logprob for top in entry.top_logprobs]],
            )
            for entry in logprobs.content
        ]
    columns = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    return [([token, *top], [value, *top.values()]) for token, value, top in columns]
