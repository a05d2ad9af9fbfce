"""Undo the compression a backend applies although it was asked for none."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Protocol

import zstandard

from policies.errors import UpstreamFailed

_PIECE = 64 * 1024
_STEP = 256


class Decoder(Protocol):
    """Bytes as they came in, pieces of plain bytes of bounded size out. Raises UpstreamFailed on rubbish."""

    def decode(self, data: bytes) -> Iterable[bytes]:
        """Plain pieces for one read."""

    def flush(self) -> None:
        """Raises UpstreamFailed when the compressed data is incomplete."""


class Identity:
    """Nothing to undo."""

    def decode(self, data: bytes) -> Iterable[bytes]:
        """See Decoder."""
        return (data,)

    def flush(self) -> None:
        """See Decoder."""


class Inflate:
    """gzip and zlib."""

    def __init__(self, wbits: int) -> None:
        self._inflate = zlib.decompressobj(wbits)

    def decode(self, data: bytes) -> Iterator[bytes]:
        """See Decoder. A bomb is taken apart piece by piece and never held whole."""
        try:
            while data:
                if piece := self._inflate.decompress(data, _PIECE):
                    yield piece
                data = self._inflate.unconsumed_tail
        except zlib.error as error:
            raise UpstreamFailed("the backend's answer is not what its content-encoding says") from error

    def flush(self) -> None:
        """See Decoder."""
        if not self._inflate.eof:
            raise UpstreamFailed("the backend's compressed answer is incomplete")


class Zstd:
    """zstd, with a window of at most 8 MiB as HTTP allows."""

    def __init__(self) -> None:
        self._inflate = zstandard.ZstdDecompressor(max_window_size=8 * 1024 * 1024).decompressobj()

    def decode(self, data: bytes) -> Iterator[bytes]:
        """See Decoder. Small inputs bound what one step can produce: a block takes four bytes and makes 128 KiB."""
        try:
            for at in range(0, len(data), _STEP):
                if self._inflate.eof:
                    return
                if piece := self._inflate.decompress(data[at : at + _STEP]):
                    yield piece
        except zstandard.ZstdError as error:
            raise UpstreamFailed("the backend's answer is not what its content-encoding says") from error

    def flush(self) -> None:
        """See Decoder."""
        if not self._inflate.eof:
            raise UpstreamFailed("the backend's compressed answer is incomplete")


def decoder_for(content_encoding: bytes) -> Decoder:
    """The decoder for a `content-encoding` header. Raises UpstreamFailed for one we cannot undo."""
    match content_encoding.strip().lower():
        case b"" | b"identity":
            return Identity()
        case b"gzip" | b"x-gzip":
            return Inflate(16 + zlib.MAX_WBITS)
        case b"deflate":
            return Inflate(zlib.MAX_WBITS)
        case b"zstd":
            return Zstd()
    raise UpstreamFailed("the backend's answer has a content-encoding that was not asked for")
