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
from proxy.tap.claim import ROOM, Row, Rows, SmallChat, SmallCompletions, token_ids
from proxy.tap.rawjson import NULL, Object
from proxy.tap.shown import Message, Shown, of_message


class _ChatChunk(msgspec.Struct, array_like=True):
    said: Message
    ids: list[int] | None
    logprobs: SmallChat | None


class _TextChunk(msgspec.Struct, array_like=True):
    said: str
    ids: list[int] | None
    logprobs: SmallCompletions | None


class Part(NamedTuple):
    """What one choice of a chunk says; None for what is absent or null."""

    said: Shown
    ids: array[int] | None
    claim: Rows | None


_chat = msgspec.json.Decoder(list[_ChatChunk])
_text = msgspec.json.Decoder(list[_TextChunk])


def read_together(endpoint: Endpoint, choices: Sequence[Object]) -> list[Part] | None:
    """What choices of a stream's chunks say, in their order; None where one of them is not as engines write it."""
    said = "delta" if endpoint == "chat" else "text"
    try:
        text = b"],[".join([b",".join(_three(choice, said)) for choice in choices])
        chunks: list[Any] = (_chat if endpoint == "chat" else _text).decode(b"[[%b]]" % text)
        return _parts(endpoint, chunks)
    except Exception:
        # Whatever it is: each by itself shows whose it is.
        return None


def _three(choice: Object, said: str) -> tuple[Raw, Raw, Raw]:
    if said == "text" and "delta" in choice:
        raise ValueError("a choice of another endpoint")
    return choice[said], choice.get("token_ids", NULL), choice.get("logprobs", NULL)


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
        parts.append(Part(of_message(chunk.said) if endpoint == "chat" else Shown(chunk.said), own, claim))
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
