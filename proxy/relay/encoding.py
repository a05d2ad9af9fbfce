"""Undo the compression a backend applies although it was asked for none."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import zstandard

from policies.errors import UpstreamFailed

_PIECE = 64 * 1024
_STEP = 256
_MOST_EMPTY = 1000
"""Streams of one answer with nothing in them."""
_MOST_IDLE = 1024 * 1024
"""Compressed bytes in a row that nothing comes of; blocks of zstd are an eighth of it."""


class Decoder(Protocol):
    """Bytes as they came in, pieces of plain bytes of bounded size out. Raises UpstreamFailed on rubbish."""

    def decode(self, data: bytes) -> Iterable[bytes]:
        """Plain pieces for one read; also an empty one now and then, where there was work that nothing came of."""

    def flush(self) -> None:
        """Raises UpstreamFailed when the compressed data is incomplete."""


class Identity:
    """Nothing to undo."""

    def decode(self, data: bytes) -> Iterable[bytes]:
        """See Decoder."""
        return (data,)

    def flush(self) -> None:
        """See Decoder."""


class _Members(ABC):
    """Compressed streams one after the other, which are one answer. What else follows the end is dropped, up to a
    bound; and so many with nothing in them, or so much that nothing comes of, is no answer."""

    step = _STEP
    """Bytes of one step: what follows the end of a stream is copied, and many may end in one read."""

    def __init__(self) -> None:
        self._inflate = self.begin(b"")
        self._dropped = self._idle = self._empty = 0
        self._said = False

    @abstractmethod
    def begin(self, data: bytes) -> Any:
        """What undoes a stream that begins so."""

    @abstractmethod
    def begins(self, first: int) -> bool:
        """Whether another stream may begin with this byte."""

    @abstractmethod
    def inflate(self, data: bytes) -> Iterator[bytes]:
        """Pieces of bounded size."""

    def decode(self, data: bytes) -> Iterator[bytes]:
        """See Decoder. A bomb is taken apart piece by piece and never held whole."""
        try:
            for at in range(0, len(data), self.step):
                part = data[at : at + self.step]
                while part:
                    if self._inflate.eof:
                        if not self.begins(part[0]):
                            self._drop(len(part))
                            break
                        self._inflate = self.begin(part)
                        self._count()
                        yield b""
                    given = len(part)
                    for piece in self.inflate(part):
                        self._said, self._idle, given = True, 0, 0
                        yield piece
                    part = self._inflate.unused_data if self._inflate.eof else b""
                    self._idle += max(0, given - len(part))
                    if self._idle > _MOST_IDLE:
                        raise UpstreamFailed("the backend's compressed answer says nothing")
        except (zlib.error, zstandard.ZstdError) as error:
            raise UpstreamFailed("the backend's answer is not what its content-encoding says") from error

    def flush(self) -> None:
        """See Decoder."""
        if not self._inflate.eof:
            raise UpstreamFailed("the backend's compressed answer is incomplete")

    def _count(self) -> None:
        """Another stream begins."""
        self._empty += not self._said
        self._said = False
        if self._empty > _MOST_EMPTY:
            raise UpstreamFailed("the backend's compressed answer says nothing")

    def _drop(self, size: int) -> None:
        self._dropped += size
        if self._dropped > _PIECE:
            raise UpstreamFailed("the backend's compressed answer has no end")


class Gzip(_Members):
    """Members of gzip (RFC 1952 2.2)."""

    step = 4096

    def begin(self, data: bytes) -> Any:
        """See _Members."""
        return zlib.decompressobj(16 + zlib.MAX_WBITS)

    def begins(self, first: int) -> bool:
        """See _Members."""
        return first == 0x1F

    def inflate(self, data: bytes) -> Iterator[bytes]:
        """See _Members."""
        while data:
            if piece := self._inflate.decompress(data, _PIECE):
                yield piece
            data = self._inflate.unconsumed_tail


class Deflate(Gzip):
    """zlib; or, as some servers have it, bare deflate, which no zlib begins like (RFC 1950 2.2)."""

    _first = b""

    def begin(self, data: bytes) -> Any:
        """See _Members."""
        zlibs = len(data) < 2 or (data[0] & 0x0F == 8 and int.from_bytes(data[:2], "big") % 31 == 0)
        return zlib.decompressobj(zlib.MAX_WBITS if zlibs else -zlib.MAX_WBITS)

    def begins(self, first: int) -> bool:
        """See _Members."""
        return False

    def decode(self, data: bytes) -> Iterator[bytes]:
        """See Decoder."""
        if len(self._first) < 2:
            self._first, data = self._first + data, b""
            if len(self._first) >= 2:
                data = self._first
                self._inflate = self.begin(data)
        yield from super().decode(data)


class Zstd(_Members):
    """Frames of zstd (RFC 8878 3.1), with a window of at most 8 MiB as HTTP allows."""

    def __init__(self) -> None:
        # One for all of them: to make one takes much longer than to read an empty frame.
        self._frames = zstandard.ZstdDecompressor(max_window_size=8 * 1024 * 1024)
        super().__init__()

    def begin(self, data: bytes) -> Any:
        """See _Members."""
        return self._frames.decompressobj()

    def begins(self, first: int) -> bool:
        """See _Members. Frames may also be there to be skipped."""
        return first == 0x28 or 0x50 <= first <= 0x5F

    def inflate(self, data: bytes) -> Iterator[bytes]:
        """See _Members. Small inputs bound what one step can produce: a block takes four bytes and makes 128 KiB."""
        if piece := self._inflate.decompress(data):
            yield piece


def decoder_for(content_encoding: bytes) -> Decoder:
    """The decoder for a `content-encoding` header. Raises UpstreamFailed for one we cannot undo."""
    codings = [coding for each in content_encoding.lower().split(b",") if (coding := each.strip()) != b"identity"]
    match codings:
        case [] | [b""]:
            return Identity()
        case [b"gzip" | b"x-gzip"]:
            return Gzip()
        case [b"deflate"]:
            return Deflate()
        case [b"zstd"]:
            return Zstd()
    raise UpstreamFailed("the backend's answer has a content-encoding that was not asked for")
