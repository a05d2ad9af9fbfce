"""The Merkle tree of RFC 6962 (2.1) and RFC 9162 (2.1): its hash, and proofs that a leaf is in it, that it only grew.

A tree of n leaves is cut where the largest power of two below n ends, and so are its parts. Everything here is about
leaf hashes (`leaf`), 32 bytes each, and about *spans* of them, `(start, end)`; whoever keeps the tree finds the hash of
a span from those of the perfect subtrees that it consists of (`perfect`, `joined`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple

EMPTY = sha256(b"").digest()
"""The hash of a tree without leaves."""
SIZE = 32
"""Bytes of a hash."""

Span = tuple[int, int]
"""Leaves from one number up to below another, as a proof asks for their hash."""


class Subtree(NamedTuple):
    """A perfect subtree: `2**level` leaves from `number << level` on."""

    level: int
    number: int


def leaf(data: bytes) -> bytes:
    """The hash of a leaf that holds this."""
    return sha256(b"\0" + data).digest()


def node(left: bytes, right: bytes) -> bytes:
    """The hash of two subtrees' parent."""
    return sha256(b"\1" + left + right).digest()


def root(hashes: Sequence[bytes]) -> bytes:
    """The hash of a tree of these leaf hashes, or of perfect subtrees of one size."""
    level = list(hashes)
    if not level:
        return EMPTY
    while len(level) > 1:
        # An odd one out goes up as it is: the right edge of every level is as large as what is left.
        paired = [node(level[at], level[at + 1]) for at in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
    return level[0]


def perfect(span: Span) -> list[Subtree]:
    """The perfect subtrees that a span of a proof, or a whole tree `(0, size)`, consists of, from left to right."""
    start, end = span
    found = []
    while start < end:
        level = (end - start).bit_length() - 1
        found.append(Subtree(level, start >> level))
        start += 1 << level
    return found


def joined(hashes: Sequence[bytes]) -> bytes:
    """The hash of a span, given those of its `perfect` subtrees."""
    if not hashes:
        return EMPTY
    found = hashes[-1]
    for each in reversed(hashes[:-1]):
        found = node(each, found)
    return found


def inclusion(index: int, size: int) -> list[Span]:
    """What proves that leaf `index` is in a tree of `size`: the hashes of these spans.

    Raises:
        ValueError: the tree has no such leaf.
    """
    if not 0 <= index < size:
        raise ValueError(f"a tree of {size} leaves has no leaf {index}")
    start, end, path = 0, size, list[Span]()
    while end - start > 1:
        middle = start + _split(end - start)
        if index < middle:
            path.append((middle, end))
            end = middle
        else:
            path.append((start, middle))
            start = middle
    return path[::-1]


def consistency(first: int, second: int) -> list[Span]:
    """What proves that a tree of `second` leaves begins with that of `first`: the hashes of these spans.

    Raises:
        ValueError: the first is larger than the second, or less than nothing.
    """
    if not 0 <= first <= second:
        raise ValueError(f"a tree of {second} leaves cannot begin with one of {first}")
    if first in (0, second):
        return []
    start, end, path, whole = 0, second, list[Span](), True
    while first != end:
        middle = start + _split(end - start)
        if first <= middle:
            path.append((middle, end))
            end = middle
        else:
            path.append((start, middle))
            start, whole = middle, False
    if not whole:
        path.append((start, end))
    return path[::-1]


def includes(root: bytes, size: int, index: int, leaf: bytes, path: Iterable[bytes]) -> bool:
    """Whether a proof shows the leaf hash at `index` of the tree with this root and size (RFC 9162 2.1.3.2)."""
    if not 0 <= index < size:
        return False
    low, last, found = index, size - 1, leaf
    for each in path:
        if last == 0 or len(each) != SIZE:
            return False
        if low & 1 or low == last:
            found = node(each, found)
            while not low & 1 and low:
                low, last = low >> 1, last >> 1
        else:
            found = node(found, each)
        low, last = low >> 1, last >> 1
    return last == 0 and found == root


def grows(first: int, before: bytes, second: int, after: bytes, path: Sequence[bytes]) -> bool:
    """Whether a proof shows that the tree `after` of `second` leaves begins with `before`, which has `first` (RFC 9162
    2.1.4.2). Every tree begins with the empty one, and with itself."""
    if not 0 <= first <= second or any(len(each) != SIZE for each in path):
        return False
    if first == second:
        return not path and before == after
    if first == 0:
        return not path and before == EMPTY
    whole = list(path) if first & (first - 1) else [before, *path]
    if not path:
        return False
    low, last = first - 1, second - 1
    while low & 1:
        low, last = low >> 1, last >> 1
    old = new = whole[0]
    for each in whole[1:]:
        if last == 0:
            return False
        if low & 1 or low == last:
            old, new = node(each, old), node(each, new)
            while not low & 1 and low:
                low, last = low >> 1, last >> 1
        else:
            new = node(new, each)
        low, last = low >> 1, last >> 1
    return last == 0 and old == before and new == after


def earlier(size: int, total: int, index: int, leaf: bytes, path: Sequence[bytes]) -> bytes | None:
    """The hash that a tree of `total` leaves had when it had `size`, as far as that follows from a proof that shows the
    leaf hash at `index` of it; else None."""
    start, end, found = index, index + 1, leaf
    known = {(start, end): found}
    for span, each in zip(inclusion(index, total), path, strict=True):
        known[span] = each
        found = node(each, found) if span[0] < start else node(found, each)
        start, end = min(start, span[0]), max(end, span[1])
        known[start, end] = found

    def of(start: int, end: int) -> bytes | None:
        if (start, end) in known:
            return known[start, end]
        if not any(start <= first and last <= end for first, last in known):
            return None
        middle = start + _split(end - start)
        left = of(start, middle)
        right = None if left is None else of(middle, end)
        return None if left is None or right is None else node(left, right)

    return of(0, size) if 0 < size <= total else None


def _split(size: int) -> int:
    """The largest power of two below `size`, which is at least 2."""
    return 1 << (size - 1).bit_length() - 1
