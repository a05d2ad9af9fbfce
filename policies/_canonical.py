"""Are the ids those that the tokenizer itself would give the text? Splitting tokens bills more for the same text.

Decoding the answer and encoding it again gives its canonical ids. Models are trained on canonical ids and emit others
rarely; a backend that splits tokens to bill more (measured at +50 % by Token Inflation, arXiv 2605.30040) does so
everywhere. Both spellings are cut where they agree on a boundary; a stretch between two such cuts that is not one and
the same token is *non-canonical*.

Left out, because honest answers differ there: the first and last stretch (a prompt may end, and a limit fall, within
a word), tokens that hold half characters, and added tokens, which encoding may or may not know.

Null hypothesis: at each token an honest model begins a *new* split spelling, one with more tokens than the canonical
one has, with probability at most `HONEST_RATES`. Distinct spellings are counted, so that an answer caught in a loop
counts its odd word once; non-canonical spellings that are no longer bill nothing and are only counted. The rate is
measured, not derived, so the level is as good as the measurement. On SmolLM2-135M (vLLM 0.32, H200 and CPU, prose,
code, lists, four languages and emoji) 13 new split spellings came in 11,800 tokens at T ≤ 1, 7 of them in the 1,981
tokens sampled at T = 1 from the whole distribution (Wilson 95 % upper bound 0.73 %), and 22 in 2,054 at T = 1.3
(1.6 %), where the text is half gibberish. A larger model strays less; the rates below leave it room all the same.
One answer is one unit of evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies._tails import binomial_tail
from policies.evidence import Evidence, Ids
from policies.spelling import Spelling

HONEST_RATES = ((1.0, 0.01), (1.3, 0.03))
"""Upper bounds per token, by the highest temperature they hold at. Above the last, nothing was measured."""
REJECT_LEVEL = 1e-9
MOST_PARTS = 512
"""Clean stretches of one answer that are encoded; one token's worth of each is left out at both ends anyway."""
_MOST_TORN = 8
"""Tokens that are left out at the ends of a stretch because they have parts of characters."""

_Ends = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Canonical:
    """How an answer's ids differ from the canonical ones.

    Attributes:
        tokens: ids compared.
        extra: ids more than the canonical spelling has.
        spellings: distinct non-canonical stretches.
        split: those of them with more tokens than the canonical spelling has.
    """

    tokens: int = 0
    extra: int = 0
    spellings: int = 0
    split: int = 0


def compare(ids: Ids, spelling: Spelling) -> Canonical | None:
    """Ids, int32 (G,), beside their canonical ones; None where the tokenizer's pieces do not join to its text."""
    pieces = spelling.pieces(ids)
    if pieces is None:
        return None
    tokens = extra = 0
    odd: set[bytes] = set()
    split: set[bytes] = set()
    for first, last in _clean(ids, pieces, spelling)[:MOST_PARTS]:
        start, end, text = _text(pieces, first, last)
        if start == end:
            continue
        canonical = spelling.encode(text)
        mine = ids[start:end]
        if np.array_equal(mine, canonical):
            tokens += max(0, len(mine) - 2)
            continue
        theirs = spelling.pieces(canonical)
        if theirs is None:
            continue
        stretch = _stretches(mine, pieces[start:end], canonical, theirs)
        if stretch is None:
            continue
        tokens += stretch.tokens
        extra += stretch.extra
        odd |= stretch.odd
        split |= stretch.split
    return Canonical(tokens, extra, len(odd), len(split))


def level(found: Canonical, evidence: Evidence) -> float | None:
    """P(as many distinct split spellings) under the null; None where no rate is known.

    None when the request forced spellings (a grammar, token lists, biases), or above the temperatures measured.
    """
    sampling = evidence.sampling
    if sampling.grammar or sampling.allowed_token_ids or sampling.logit_bias or sampling.bad_words:
        return None
    rate = next((rate for warmest, rate in HONEST_RATES if sampling.temperature <= warmest), None)
    return None if rate is None else binomial_tail(found.tokens, rate, found.split)


def _clean(ids: Ids, pieces: Sequence[bytes], spelling: Spelling) -> list[tuple[int, int]]:
    """Stretches of whole characters without added or unknown tokens, as (start, end)."""
    dirty = np.isin(ids, np.fromiter(spelling.added, np.int64, len(spelling.added)))
    # A byte that is never UTF-8, so that no character reaches across such a token.
    whole = [b"\xff" if odd or not piece else piece for odd, piece in zip(dirty.tolist(), pieces, strict=True)]
    broken = _broken(b"".join(whole))
    ends = _ends(whole) if broken else np.zeros(0, np.int64)
    for first, last in broken:
        at = np.searchsorted(ends, (first, last), side="right")
        dirty[at[0] : at[1] + 1] = True
    edges = np.flatnonzero(np.diff(np.concatenate(([True], dirty, [True])).astype(np.int8)))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _text(pieces: Sequence[bytes], start: int, end: int) -> tuple[int, int, str]:
    """Where a stretch's whole characters are, and their text: the tokens around it may have parts of its first and last
    one. Nothing of it where its tokens begin or end within characters again and again."""
    for _ in range(_MOST_TORN):
        try:
            return start, end, b"".join(pieces[start:end]).decode()
        except UnicodeDecodeError as error:
            start, end = (start + 1, end) if error.start == 0 else (start, end - 1)
    return start, start, ""


def _broken(raw: bytes) -> list[tuple[int, int]]:
    """First and last byte of every stretch that is no UTF-8; the last of too many goes on to the end."""
    text = raw.decode("utf-8", "surrogateescape")
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    odd = (points >= 0xDC80) & (points <= 0xDCFF)
    if not odd.any():
        return []
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    widths[odd] = 1
    at = (np.cumsum(widths) - widths)[odd]
    parted = np.flatnonzero(np.diff(at) > 1)
    firsts, lasts = at[[0, *(parted + 1)]].tolist(), at[[*parted, -1]].tolist()
    found = list(zip(firsts, lasts, strict=True))
    if len(found) > MOST_PARTS:
        found = [*found[:MOST_PARTS], (found[MOST_PARTS][0], len(raw) - 1)]
    return found


@dataclass(frozen=True, slots=True)
class _Stretches:
    tokens: int
    extra: int
    odd: frozenset[bytes]
    split: frozenset[bytes]


def _stretches(
    ids: Ids, pieces: Sequence[bytes], canonical: Ids, canonical_pieces: Sequence[bytes]
) -> _Stretches | None:
    ends, others = _ends(pieces), _ends(canonical_pieces)
    if not len(others) or b"".join(canonical_pieces)[int(others[-1] - ends[-1]) :] != b"".join(pieces):
        return None
    others = others - (others[-1] - ends[-1])  # a space the tokenizer puts before every text
    cuts = np.intersect1d(ends, others)
    part, other_part = np.searchsorted(cuts, ends), np.searchsorted(cuts, others)
    count, other_count = np.bincount(part, minlength=len(cuts)), np.bincount(other_part, minlength=len(cuts))
    differs = (count != 1) | (other_count != 1)
    differs[0] = differs[-1] = False
    starts = np.searchsorted(part, np.arange(len(cuts)))

    def spelled(where: NDArray[np.bool_]) -> frozenset[bytes]:
        return frozenset(ids[starts[at] : starts[at] + count[at]].tobytes() for at in np.flatnonzero(where))

    more = count - other_count
    inside = (part > 0) & (part < len(cuts) - 1)
    return _Stretches(int(inside.sum()), int(more[differs].sum()), spelled(differs), spelled(differs & (more > 0)))


def _ends(pieces: Sequence[bytes]) -> _Ends:
    return np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))
