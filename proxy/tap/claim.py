"""Claimed logprobs, as they arrive and as arrays.

The backend was asked to spell tokens as `token_id:N`, so ids come from the strings. Rows are kept in flat
arrays (12 bytes per entry) while the answer arrives and become matrices once, at the end.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Raw

from policies.evidence import PAD_ID, TOP_LOGPROBS, Endpoint, Ids, Logprobs
from proxy.tap.outline import size_of
from proxy.tap.rawjson import UNREADABLE, read_value

WIDTH = TOP_LOGPROBS + 1
ROOM = WIDTH + 1
"""Entries of a row: the sampled token comes twice, by itself and in the list."""
_PREFIX = "token_id:"
_BETWEEN = ";"
"""No part of a number, so that no two tokens can be one between them."""
MAX_ENTRY = 1024 * 1024
"""Bytes of JSON of one position; the longest tokens take a hundredth of it."""
_LARGEST = sys.float_info.max


class _Top(msgspec.Struct, gc=False):
    token: str
    logprob: float


class _Entry(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[_Top] = []


class SmallChat(msgspec.Struct):
    """Logprobs of chat."""

    content: list[_Entry]


class SmallCompletions(msgspec.Struct):
    """Logprobs of completions."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]


class _Chat(msgspec.Struct):
    content: list[Raw]


class _Completions(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[Raw]


_entry = msgspec.json.Decoder(_Entry)
_top = msgspec.json.Decoder(dict[str, float])
_small_chat = msgspec.json.Decoder(SmallChat)
_small_completions = msgspec.json.Decoder(SmallCompletions)
_chat = msgspec.json.Decoder(_Chat)
_completions = msgspec.json.Decoder(_Completions)

Row = tuple[list[str], list[float]]
"""Token strings and logprobs of one position: the sampled token, then the backend's list."""


class Rows(NamedTuple):
    """Rows of a claim in flat arrays, int32 and float32, with the number of entries of each."""

    ids: array[int]
    logprobs: array[float]
    counts: array[int]


def token_ids(tokens: Sequence[str]) -> list[int]:
    """The ids of `token_id:N` strings. Raises ValueError for any other string."""
    if not tokens:
        return []
    parts = (_BETWEEN + _BETWEEN.join(tokens)).split(_BETWEEN + _PREFIX)
    if len(parts) != len(tokens) + 1:
        raise ValueError("a token is not spelled token_id:N")
    return list(map(int, parts[1:]))


class Claim:
    """The claim of one choice, one row per logprob entry."""

    def __init__(self) -> None:
        self.bad_logprobs = False
        self.bad_ids = False
        self.rows = 0
        self.present = False
        self._ids = array("i")
        self._logprobs = array("f")
        self._counts = array("i")

    def add(self, endpoint: Endpoint, logprobs: Raw, expected: int | None, most: int) -> bool:
        """Takes a choice's `logprobs`; `expected` is the number of tokens it came with, when known. Whether there were
        more than `most` rows, which are left out."""
        before = self.rows
        self.present = True
        over = False
        for tokens, values in _rows(endpoint, logprobs):
            if self.rows - before >= most:
                over = True
                break
            self._row(tokens, values)
        self._complete(before, expected)
        return over

    def take(self, rows: Rows, expected: int | None) -> None:
        """As `add`, for rows that were read already."""
        before = self.rows
        self.present = True
        self._ids += rows.ids
        self._logprobs += rows.logprobs
        self._counts += rows.counts
        self.rows += len(rows.counts)
        self._complete(before, expected)

    def _complete(self, before: int, expected: int | None) -> None:
        if expected is not None:
            if self.rows - before != expected:
                self.bad_logprobs = True
            for _ in range(expected - (self.rows - before)):
                self._pad()

    def skip(self, count: int) -> None:
        """Tokens that came without logprobs."""
        for _ in range(count):
            self._pad()

    def arrays(self) -> tuple[Ids, Logprobs]:
        """int32 and float32 (rows, 21), the sampled token first and not repeated."""
        rows = self.rows
        counts = np.frombuffer(self._counts, np.int32) if rows else np.zeros(0, np.int32)
        ids = np.full((rows, ROOM), PAD_ID, np.int32)
        logprobs = np.full((rows, ROOM), -np.inf, np.float32)
        if len(self._ids):
            at_row = np.repeat(np.arange(rows), counts)
            starts = np.repeat(np.cumsum(counts) - counts, counts)
            at_column = np.arange(len(self._ids)) - starts
            ids[at_row, at_column] = np.frombuffer(self._ids, np.int32)
            logprobs[at_row, at_column] = np.frombuffer(self._logprobs, np.float32)
        return self._without_repeats(ids, logprobs)

    def _without_repeats(self, ids: Ids, logprobs: Logprobs) -> tuple[Ids, Logprobs]:
        repeated = np.zeros(ids.shape, bool)
        repeated[:, 1:] = (ids[:, 1:] == ids[:, :1]) & (ids[:, 1:] != PAD_ID)
        # Only the sampled token's own entry is a repeat; another one is the backend's doing and stays visible.
        repeated[:, 1:] &= np.cumsum(repeated[:, 1:], axis=1) == 1
        if bool((logprobs != logprobs[:, :1])[repeated].any()):
            self.bad_logprobs = True
        order = np.argsort(repeated, axis=1, kind="stable")
        kept = np.take_along_axis(repeated, order, axis=1)
        ids = np.where(kept, PAD_ID, np.take_along_axis(ids, order, axis=1))
        logprobs = np.where(kept, -np.inf, np.take_along_axis(logprobs, order, axis=1))
        return (
            np.ascontiguousarray(ids[:, :WIDTH], np.int32),
            np.ascontiguousarray(logprobs[:, :WIDTH], np.float32),
        )

    def _row(self, tokens: list[str], values: list[float]) -> None:
        if not values:
            self.bad_logprobs = True
            self._pad()
            return
        try:
            ids = array("i", token_ids(tokens[:ROOM]))
            if min(ids) < 0:
                raise ValueError("negative id")
        except (ValueError, OverflowError):
            self.bad_ids = True
            self._pad()
            return
        try:
            logprobs = array("f", values[:ROOM])
        except OverflowError:
            self.bad_logprobs = True
            self._pad()
            return
        self._ids += ids
        self._logprobs += logprobs
        self._counts.append(len(ids))
        self.rows += 1

    def _pad(self) -> None:
        self._counts.append(0)
        self.rows += 1


def fitted(ids: Ids, logprobs: Logprobs, rows: int | None) -> tuple[Ids, Logprobs]:
    """The claim with exactly `rows` rows, cut or padded; of shape (0, 0) for None."""
    if rows is None:
        return np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
    if len(ids) == rows:
        return ids, logprobs
    missing = ((0, max(0, rows - len(ids))), (0, 0))
    return (
        np.pad(ids[:rows], missing, constant_values=PAD_ID),
        np.pad(logprobs[:rows], missing, constant_values=-np.inf),
    )


def _rows(endpoint: Endpoint, logprobs: Raw) -> Iterable[Row]:
    try:
        if size_of(logprobs) > MAX_ENTRY:
            return _large_rows(endpoint, logprobs)
        if endpoint == "chat":
            return list(map(_chat_columns, _small_chat.decode(logprobs).content))
        parsed = _small_completions.decode(logprobs)
        return [
            ([token, *top], [value, *top.values()])
            for token, value, top in zip(parsed.tokens, parsed.token_logprobs, parsed.top_logprobs, strict=True)
        ]
    except UNREADABLE:
        return _salvaged(endpoint, read_value(logprobs))


def _large_rows(endpoint: Endpoint, logprobs: Raw) -> Iterator[Row]:
    """One row after the other, so that only one of them is ever held as Python objects."""
    if endpoint == "chat":
        return map(_chat_entry, _chat.decode(logprobs).content)
    parsed = _completions.decode(logprobs)
    columns = zip(parsed.tokens, parsed.token_logprobs, parsed.top_logprobs, strict=True)
    if not len(parsed.tokens) == len(parsed.token_logprobs) == len(parsed.top_logprobs):
        raise ValueError("columns of several lengths")
    return itertools.starmap(_completions_entry, columns)


def _chat_entry(text: Raw) -> Row:
    if size_of(text) > MAX_ENTRY:
        return [], []
    try:
        return _chat_columns(_entry.decode(text))
    except UNREADABLE:
        return _chat_row(read_value(text))


def _chat_columns(entry: _Entry) -> Row:
    return (
        [entry.token, *[top.token for top in entry.top_logprobs]],
        [entry.logprob, *[top.logprob for top in entry.top_logprobs]],
    )


def _completions_entry(token: str, value: float, text: Raw) -> Row:
    if size_of(text) > MAX_ENTRY:
        return [], []
    try:
        top = _top.decode(text)
    except UNREADABLE:
        found = read_value(text)
        top = found if isinstance(found, dict) else {}
        return _row_of([token, *top], [value, *top.values()])
    return [token, *top], [value, *top.values()]


def _salvaged(endpoint: Endpoint, value: Any) -> list[Row]:
    """The rows that can be read of logprobs that cannot be read as a whole; an unreadable row is empty."""
    if not isinstance(value, dict):
        return []
    if endpoint == "chat":
        content = value.get("content")
        return [_chat_row(entry) for entry in content] if isinstance(content, list) else []
    columns = [value.get(name) for name in ("tokens", "token_logprobs", "top_logprobs")]
    lists = [column if isinstance(column, list) else [] for column in columns]
    return [_row_of([token, *top], [logprob, *top.values()]) for token, logprob, top in _zipped(*lists)]


def _chat_row(entry: Any) -> Row:
    if not isinstance(entry, dict):
        return [], []
    top = entry.get("top_logprobs")
    entries = [entry, *(top if isinstance(top, list) else [])]
    if not all(isinstance(item, dict) for item in entries):
        return [], []
    return _row_of([item.get("token") for item in entries], [item.get("logprob") for item in entries])


def _zipped(tokens: list[Any], logprobs: list[Any], tops: list[Any]) -> list[tuple[Any, Any, dict[Any, Any]]]:
    rows = zip(tokens, logprobs, tops, strict=False)
    return [(token, logprob, top if isinstance(top, dict) else {}) for token, logprob, top in rows]


def _row_of(tokens: list[Any], values: list[Any]) -> Row:
    """A row whose every entry is usable, or an empty one."""
    usable = all(isinstance(token, str) for token in tokens) and all(map(_is_number, values))
    return (tokens, [float(value) for value in values]) if usable else ([], [])


def _is_number(value: Any) -> bool:
    """Whether it is one that a float holds; JSON's integers may have any size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST
