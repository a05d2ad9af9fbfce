"""Logprobs for a client that asked for them: as many as it asked for, with strings instead of ids.

We ask the backend for the top 20 with tokens spelled `token_id:N`; the client gets what the backend would
have sent to its own request. vLLM's list begins with the sampled token. Chat cuts it after k entries;
completions keep k, or k + 1 when the sampled token is outside the top k. Whether it is inside, when its
logprob ties with the k-th, cannot be known; it is then taken to be inside.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import msgspec
from msgspec import Raw

from proxy.tap.claim import MAX_ENTRY, token_ids
from proxy.tap.outline import size_of
from proxy.tap.rawjson import Object, raw, read_object, read_value
from proxy.tap.tokens import CONTEXT, TokenStrings


class _Top(msgspec.Struct):
    token: str
    logprob: Raw
    bytes: Raw | list[int] = Raw(b"null")


class _Entry(msgspec.Struct):
    token: str
    logprob: Raw
    bytes: Raw
    top_logprobs: list[_Top]


_entry = msgspec.json.Decoder(_Entry)
_entries = msgspec.json.Decoder(list[_Entry])
_strings = msgspec.json.Decoder(list[str])
_raws = msgspec.json.Decoder(list[Raw])
_tops = msgspec.json.Decoder(list[dict[str, Raw] | None])


class Rebuilder:
    """Rebuilds the logprobs of one choice, chunk by chunk.

    Without `strings` tokens keep the spelling they came with; only the number of alternatives changes.
    Raises msgspec.DecodeError, ValueError or OverflowError for logprobs that are not as vLLM writes them.
    """

    def __init__(self, count: int, strings: TokenStrings | None) -> None:
        self._count = count
        self._strings = strings
        self._context: deque[int] = deque(maxlen=CONTEXT)
        self._offset = 0

    def chat(self, logprobs: Raw) -> Raw:
        """Chat's `{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}`."""
        fields = _fields(logprobs)
        content = fields["content"]
        if size_of(content) <= MAX_ENTRY:
            return raw({**fields, "content": list(map(self._renamed_entry, _entries.decode(content)))})
        # Of a large one, only one position is held as Python objects.
        written = [raw(self._renamed_entry(_entry.decode(entry))) for entry in _raws.decode(content)]
        return raw({**fields, "content": written})

    def _renamed_entry(self, entry: _Entry) -> _Entry:
        if self._count >= 0:
            entry.top_logprobs = entry.top_logprobs[: self._count]
        if self._strings is not None:
            named = [entry.token, *[top.token for top in entry.top_logprobs]]
            texts = self._texts(named)
            entry.token = texts[0]
            for top, text_of in zip(entry.top_logprobs, texts[1:], strict=True):
                top.token = text_of
                top.bytes = list(text_of.encode("utf-8", "replace"))
        return entry

    def completions(self, logprobs: Raw) -> Raw:
        """Completions' `{"text_offset", "token_logprobs", "tokens", "top_logprobs"}`."""
        fields = _fields(logprobs)
        tokens = _strings.decode(fields["tokens"])
        values = _raws.decode(fields["token_logprobs"])
        tops = _tops.decode(fields["top_logprobs"])
        offsets: list[int] = []
        for at, (value, top) in enumerate(zip(values, tops, strict=True)):
            kept = list((top or {}).items())[: self._kept(value, top or {})]
            if self._strings is not None:
                texts = self._texts([tokens[at], *[token for token, _ in kept]])
                tokens[at] = texts[0]
                kept = [(text, logprob) for text, (_, logprob) in zip(texts[1:], kept, strict=True)]
            if top is not None:
                tops[at] = dict(kept)
            offsets.append(self._offset)
            self._offset += len(tokens[at])
        new: dict[str, Any] = {"text_offset": offsets, "tokens": tokens, "top_logprobs": tops}
        return raw({name: new.get(name, value) for name, value in fields.items()})

    def salvaged(self, logprobs: Raw) -> Raw:
        """Logprobs that neither of the above can read (`NaN`, a list that is none), as far as they go: never more
        alternatives than asked for, and strings wherever ids can be read. Raises ValueError."""
        fields = read_value(logprobs)
        if not isinstance(fields, dict):
            raise ValueError("logprobs are not an object")
        for entry in _list(fields.get("content")):
            if isinstance(entry, dict):
                if self._count >= 0:
                    entry["top_logprobs"] = _list(entry.get("top_logprobs"))[: self._count]
                for one in (entry, *_list(entry.get("top_logprobs"))):
                    self._name(one)
        if "tokens" in fields:
            fields["tokens"] = [self._text(token) for token in _list(fields["tokens"])]
            fields["top_logprobs"] = [self._renamed(top) for top in _list(fields.get("top_logprobs"))]
        return Raw(json.dumps(fields, separators=(",", ":")).encode())

    def _renamed(self, top: Any) -> Any:
        if not isinstance(top, dict):
            return top
        kept = list(top.items())
        if self._count >= 0:
            kept = kept[: max(1, self._count)]
        return {self._text(token): value for token, value in kept}

    def _name(self, entry: Any) -> None:
        if isinstance(entry, dict) and isinstance(entry.get("token"), str):
            text = self._text(entry["token"])
            if text != entry["token"]:
                entry["token"], entry["bytes"] = text, list(text.encode("utf-8", "replace"))

    def _text(self, token: Any) -> Any:
        if self._strings is None or not isinstance(token, str):
            return token
        try:
            return self._strings.at(token_ids([token]), tuple(self._context))[0]
        except (ValueError, OverflowError):
            return token

    def _texts(self, named: list[str]) -> list[str]:
        assert self._strings is not None
        ids = token_ids(named)
        texts = self._strings.at(ids, tuple(self._context))
        self._context.append(ids[0])
        return texts

    def _kept(self, value: Raw, top: dict[str, Raw]) -> int:
        """How many entries of a completions list vLLM would have sent: k with the sampled token in the top k."""
        if self._count < 0 or len(top) <= self._count:
            return len(top)
        if self._count == 0:
            return 1
        last_inside = list(top.values())[self._count]
        inside = float(read_value(value)) >= float(read_value(last_inside))
        return self._count if inside else self._count + 1


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _fields(logprobs: Raw) -> Object:
    fields = read_object(logprobs)
    if fields is None:
        raise ValueError("logprobs are not an object")
    return fields
