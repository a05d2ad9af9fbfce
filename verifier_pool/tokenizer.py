"""A model's tokenizer, read once per worker, as `policies.spelling.Spelling`. No torch, only `tokenizers`."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from policies.evidence import Ids
from policies.settings import ModelSettings

logger = logging.getLogger(__name__)

_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTEXT = 4096
"""Last ids of a prompt that a text is decoded behind."""
_HALF_CONTEXT = 131_072
"""Ids of a prompt that ends in half a character, at most, behind which a text is decoded: all of them, several times,
since the first text of such an answer is that of its whole prompt."""
_WORK_PER_TOKEN, _WORK_PER_CONTEXT, _WORK = 16, 4, 65_536
"""Ids that are decoded, at most, to tell what each of an answer's adds, per id of the answer, per id before it, and
besides. Plain words take 2 each, and emoji of four tokens 6.5."""


class TokenizerSpelling:
    """Spells as vLLM's fast detokeniser does, whose library this is."""

    def __init__(self, tokenizer: Tokenizer, sha256: str = "") -> None:
        self._tokenizer = tokenizer
        self.sha256 = sha256
        """Of its file, in hex; empty where it was read from none."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        decoder = tokenizer.get_added_tokens_decoder()
        self._added = {int(id): str(token.content) for id, token in decoder.items()}
        self._special = frozenset(int(id) for id, token in decoder.items() if token.special)
        self._pieces = _piece_table(tokenizer, self._added)
        self._speak = _speaking_tables(tokenizer, self._added)

    @classmethod
    def load(cls, path: str | Path) -> TokenizerSpelling:
        """From a `tokenizer.json` or the folder that holds one. Raises OSError or ValueError."""
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        data = file.read_bytes()
        text = data.decode()
        try:
            return cls(Tokenizer.from_str(text), hashlib.sha256(data).hexdigest())
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file.name}: {error}") from error

    @property
    def added(self) -> Mapping[int, str]:
        """Added tokens and their text."""
        return self._added

    @property
    def special_ids(self) -> frozenset[int]:
        """Added tokens that decoding leaves out."""
        return self._special

    def decode(self, ids: Ids, *, skip_special_tokens: bool) -> str:
        """The text of all ids at once."""
        return str(self._tokenizer.decode(_legal(ids), skip_special_tokens=skip_special_tokens))

    def steps(self, ids: Ids, *, context: Ids, skip_special_tokens: bool) -> list[str] | None:
        """What each id adds to the text; about 0.8 µs per id. None where it would take more than linear time, or the
        whole of a long prompt several times."""
        speaking = self._speaking(ids, skip_special_tokens)
        texts: list[str] = [""] * len(ids)
        before = self._recent(context[self._speaking(context, skip_special_tokens)], skip_special_tokens)
        if len(before) > _HALF_CONTEXT:
            return None
        stream = DecodeStream(ids=before.tolist(), skip_special_tokens=skip_special_tokens)
        # The library decodes anew, at every step, all ids since the one before the last that made text.
        window = pending = len(before)
        left = _WORK_PER_TOKEN * len(ids) + _WORK_PER_CONTEXT * len(before) + _WORK
        for at, id in zip(np.flatnonzero(speaking).tolist(), ids[speaking].tolist(), strict=True):
            window, pending = window + 1, pending + 1
            left -= window
            if left < 0:
                return None
            try:
                text = stream.step(self._tokenizer, id)
            except Exception as error:  # the library raises bare Exception
                if not str(error).startswith("Invalid prefix"):
                    raise ValueError(str(error)) from error
                # vLLM starts a new stream here, which forgets what came before.
                stream = DecodeStream(skip_special_tokens=skip_special_tokens)
                window = pending = 1
                text = stream.step(self._tokenizer, id)
            if text:
                window, pending = pending, 0
                texts[at] = text
        return texts

    def _speaking(self, ids: Ids, skip_special_tokens: bool) -> NDArray[np.bool_]:
        """Which ids the library does not leave out wherever they stand: those stay out of streams, which would decode
        them again and again."""
        speaks = self._speak[skip_special_tokens]
        spoken: NDArray[np.bool_] = speaks[np.where((ids >= 0) & (ids < len(speaks) - 1), ids, len(speaks) - 1)]
        return spoken

    def _recent(self, context: Ids, skip_special_tokens: bool) -> Ids:
        """The end of a long context, which says as much as all of it: what follows half a character says more."""
        recent = context[-_CONTEXT:]
        if len(recent) == len(context):
            return context
        return context if self.decode(recent, skip_special_tokens=skip_special_tokens).endswith("\ufffd") else recent

    def encode(self, text: str) -> Ids:
        """Canonical ids; about 1 µs per id."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def pieces(self, ids: Ids) -> Sequence[bytes] | None:
        """The bytes of each id."""
        table = self._pieces
        if table is None:
            return None
        known = (ids >= 0) & (ids < len(table) - 1)
        pieces: list[bytes] = table[np.where(known, ids, len(table) - 1)].tolist()
        return pieces


def spelling_of(model: ModelSettings) -> TokenizerSpelling | None:
    """The tokenizer of a declared model, read once per process; None where there is none that can be read."""
    return _read(model.tokenizer) if model.tokenizer else None


@lru_cache(maxsize=16)
def _read(path: str) -> TokenizerSpelling | None:
    try:
        return TokenizerSpelling.load(path)
    except (OSError, ValueError) as error:
        logger.warning(
            "texts cannot be held against ids: the tokenizer %s cannot be read (%s)", path, type(error).__name__
        )
        return None


def _legal(ids: Ids) -> list[int]:
    """Ids the library can take: it refuses negative ones."""
    legal: list[int] = np.maximum(ids, 0).tolist()
    return legal


def _speaking_tables(tokenizer: Tokenizer, added: Mapping[int, str]) -> dict[bool, NDArray[np.bool_]]:
    """Which ids decoding takes, with and without special tokens left out; False for all others, last."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    known = np.zeros(max([*vocabulary.values(), *added], default=-1) + 2, np.bool_)
    known[[*vocabulary.values(), *added]] = True
    for id in np.flatnonzero(~known[:-1]).tolist():
        known[id] = tokenizer.id_to_token(id) is not None
    spoken = known.copy()
    for id in added:
        spoken[id] = bool(tokenizer.decode([id])) or not tokenizer.decode([id], skip_special_tokens=False)
    return {False: known, True: spoken}


def _piece_table(tokenizer: Tokenizer, added: Mapping[int, str]) -> NDArray[np.object_] | None:
    """The bytes of every id, and none for all others last.

    None for decoders that neither map bytes to letters nor spaces to `▁`.
    """
    kinds = _decoder_kinds(json.loads(tokenizer.to_str()).get("decoder"))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if "ByteLevel" in kinds:
        letters = _byte_letters()
        table = {id: bytes(letters.get(letter, 0x3F) for letter in piece) for piece, id in vocabulary.items()}
    elif kinds & {"Metaspace", "ByteFallback"}:
        table = {id: _space_piece(piece) for piece, id in vocabulary.items()}
    else:
        return None
    table |= {id: text.encode() for id, text in added.items()}
    pieces = np.full(max(table, default=-1) + 2, b"", np.object_)
    for id, piece in table.items():
        pieces[id] = piece
    return pieces


def _space_piece(piece: str) -> bytes:
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return {str(step.get("type")) for step in steps}


def _byte_letters() -> dict[str, int]:
    """Byte-level BPE's letters: printable Latin-1 bytes stand for themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
