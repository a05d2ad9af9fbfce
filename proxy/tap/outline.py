"""How deep, how wide and how large JSON is, found out without reading it, so that it can be refused before it is.

Everything here is undefined for what is not JSON, and takes memory for about a megabyte whatever comes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

_PIECE = 256 * 1024
_QUOTE, _COMMA = b'",'
_STEPS = np.zeros(256, np.int64)
_STEPS[list(b"{[")] = 1
_STEPS[list(b"}]")] = -1
_BUT_BRACKETS, _BUT_MARKS = (bytes(set(range(256)).difference(kept)) for kept in (b'"{}[]', b'",{}[]'))


def size_of(data: bytes | Raw) -> int:
    """Bytes it has."""
    return len(data) if isinstance(data, bytes) else len(memoryview(data))


def is_deeper(data: bytes, limit: int) -> bool:
    """Whether objects and arrays stand more than `limit` deep inside each other; of few of them it is told at once."""
    if data.count(b"{") + data.count(b"[") <= limit:
        return False
    return any(int(depths.max(initial=0)) > limit for _, depths in _structure(data, _BUT_BRACKETS))


def has_more_values(data: bytes, limit: int) -> bool:
    """Whether there are more than `limit` values in it, containers included."""
    if 1 + data.count(b",") + data.count(b"{") + data.count(b"[") <= limit:
        return False
    found = 1
    for marks, _ in _structure(data, _BUT_MARKS):
        found += int((_STEPS[marks] >= 0).sum())
    return found > limit


def is_wider(data: bytes, depth: int, limit: int) -> bool:
    """Whether the containers up to `depth` deep have more than `limit` members together, give or take one each."""
    if data.count(b",") <= limit:
        return False
    found = 0
    for marks, depths in _structure(data, _BUT_MARKS):
        found += int(((marks == _COMMA) & (depths <= depth)).sum())
        if found > limit:
            return True
    return False


def _structure(data: bytes, dropped: bytes) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Commas and brackets outside strings that are not `dropped`, piece by piece, each with the depth it stands at (a
    container's own brackets stand inside it)."""
    escaped, inside, depth = False, False, 0
    for at in range(0, len(data), _PIECE):
        piece = data[at : at + _PIECE]
        if escaped:
            piece = piece[1:]
        piece, escaped = _unescaped(piece)
        # What a mark stands in is told by how many quotes are before it, odd or even: pairs of them can go.
        piece = piece.translate(None, dropped).replace(b'""', b"")
        marks = np.frombuffer(piece, np.uint8)
        if inside or b'"' in piece:
            quotes = marks == _QUOTE
            strings = np.bitwise_xor.accumulate(quotes) ^ inside
            if len(marks):
                inside = bool(strings[-1])
            marks = marks[~strings & ~quotes]
        steps = _STEPS[marks]
        after = depth + np.cumsum(steps)
        if len(marks):
            depth = int(after[-1])
        yield marks, after + (steps < 0)


def _unescaped(piece: bytes) -> tuple[bytes, bool]:
    """Without escaped characters; and whether it ends in the backslash that escapes the next one."""
    if b"\\" not in piece:
        return piece, False
    piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
    return piece, piece.endswith(b"\\")
