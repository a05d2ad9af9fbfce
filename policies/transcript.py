"""What a tokenizer said while an answer was judged, word for word, so that it can be judged again without it.

A tokenizer is megabytes, and what a judgement asks of it a few bytes per token. `Recorder` passes every question on and
keeps the answer; `Transcript` answers the same questions again, and raises `NotSaid` for any other: a judgement that
asks something else than it did is another judgement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from policies.errors import BundleError
from policies.evidence import Ids
from policies.spelling import Spelling

T = TypeVar("T")


class NotSaid(BundleError):
    """A question that was not asked when the answer was judged."""


class Added(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tokenizer's added tokens: ids and texts (UTF-8), ascending by id, and which ids are special."""

    ids: tuple[int, ...] = ()
    texts: tuple[bytes, ...] = ()
    special: tuple[int, ...] = ()

    @classmethod
    def of(cls, spelling: Spelling) -> Added:
        """Those of a tokenizer."""
        known = sorted(spelling.added.items())
        texts = tuple(text.encode("utf-8", "surrogatepass") for _, text in known)
        return cls(tuple(id for id, _ in known), texts, tuple(sorted(spelling.special_ids)))


class Said(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Questions by hash, and their answers: texts and pieces as bytes, ids as little-endian int32. An `encoded` of None
    is a text that is no Unicode, which the tokenizer refused."""

    decoded: dict[bytes, bytes] = {}
    steps: dict[bytes, list[bytes] | None] = {}
    encoded: dict[bytes, bytes | None] = {}
    pieces: dict[bytes, list[bytes] | None] = {}


class Recorder:
    """Speaks as the tokenizer does (`policies.spelling.Spelling`), and keeps what it says."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self.said = Said({}, {}, {}, {})
        self.sha256 = str(getattr(spelling, "sha256", ""))
        """Of the tokenizer's file, in hex; empty where that is not known."""

    @property
    def added(self) -> Mapping[int, str]:
        """As the tokenizer's."""
        return self._spelling.added

    @property
    def special_ids(self) -> frozenset[int]:
        """As the tokenizer's."""
        return self._spelling.special_ids

    def decode(self, ids: Ids, *, skip_special_tokens: bool) -> str:
        """As the tokenizer's."""
        text = self._spelling.decode(ids, skip_special_tokens=skip_special_tokens)
        self.said.decoded[_asked(ids, skip=skip_special_tokens)] = _bytes(text)
        return text

    def steps(self, ids: Ids, *, context: Ids, skip_special_tokens: bool) -> list[str] | None:
        """As the tokenizer's."""
        texts = self._spelling.steps(ids, context=context, skip_special_tokens=skip_special_tokens)
        said = None if texts is None else [_bytes(text) for text in texts]
        self.said.steps[_asked(ids, context, skip=skip_special_tokens)] = said
        return texts

    def encode(self, text: str) -> Ids:
        """As the tokenizer's."""
        try:
            ids = self._spelling.encode(text)
        except (UnicodeError, TypeError):
            self.said.encoded[_hash(_bytes(text))] = None
            raise
        self.said.encoded[_hash(_bytes(text))] = np.ascontiguousarray(ids, "<i4").tobytes()
        return ids

    def pieces(self, ids: Ids) -> Sequence[bytes] | None:
        """As the tokenizer's."""
        pieces = self._spelling.pieces(ids)
        self.said.pieces[_asked(ids)] = None if pieces is None else list(pieces)
        return pieces


class Transcript:
    """Says again what a tokenizer said. Every method raises NotSaid for what it was not asked then."""

    def __init__(self, added: Added, said: Said) -> None:
        texts = (text.decode("utf-8", "surrogatepass") for text in added.texts)
        self._added = dict(zip(added.ids, texts, strict=True))
        self._special = frozenset(added.special)
        self._said = said

    @property
    def added(self) -> Mapping[int, str]:
        """Added tokens and their text."""
        return self._added

    @property
    def special_ids(self) -> frozenset[int]:
        """Those that decoding may leave out."""
        return self._special

    def decode(self, ids: Ids, *, skip_special_tokens: bool) -> str:
        """The text of all ids at once."""
        return _text(_known(self._said.decoded, _asked(ids, skip=skip_special_tokens), "the text of ids"))

    def steps(self, ids: Ids, *, context: Ids, skip_special_tokens: bool) -> list[str] | None:
        """What each id adds to the text."""
        said = _known(self._said.steps, _asked(ids, context, skip=skip_special_tokens), "what each id adds to a text")
        return None if said is None else [_text(each) for each in said]

    def encode(self, text: str) -> Ids:
        """int32, the canonical ids of a text. Raises UnicodeError where it is no Unicode."""
        said = _known(self._said.encoded, _hash(_bytes(text)), "the ids of a text")
        if said is None:
            raise UnicodeError("a text that the tokenizer cannot read")
        return np.frombuffer(said, "<i4").astype(np.int32, copy=False)

    def pieces(self, ids: Ids) -> Sequence[bytes] | None:
        """The bytes of each id."""
        said = _known(self._said.pieces, _asked(ids), "the bytes of ids")
        if said is not None and len(said) != len(ids):
            raise NotSaid("the tokenizer's words do not fit the ids")
        return said


def _known(said: Mapping[bytes, T], asked: bytes, what: str) -> T:
    if asked not in said:
        raise NotSaid(f"the tokenizer was not asked for {what}")
    return said[asked]


def _asked(ids: Ids, context: Ids | None = None, *, skip: bool = False) -> bytes:
    parts = [ids] if context is None else [ids, context]
    packed = b"".join(len(part).to_bytes(8, "big") + np.ascontiguousarray(part, "<i4").tobytes() for part in parts)
    return _hash(bytes([skip]) + packed)


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:16]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
