"""What arrives of a body, offered in the moment it arrives to who can pass it on at once.

A task that waits for a part of a stream is woken through everything that awaits it, which costs more than the part
does. So who reads may leave word of how nearly every part is dealt with, and is woken for the others alone.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import StreamReader

Take = Callable[[bytes], bool]
"""Deals with a part, or does nothing and returns False. It does not raise, and does nothing that waits."""


class Passing(StreamReader):
    """aiohttp's reader of a body, whose connection may have a `take`."""

    __slots__ = ()

    def feed_data(self, data: bytes, size: int = 0) -> bool:
        """A part arrived."""
        take: Take | None = getattr(self._protocol, "take", None)
        if take is None or self._buffer or not data or not take(data):
            return super().feed_data(data, size)
        self.total_bytes += len(data)
        self._cursor += len(data)
        return False

    def end_http_chunk_receiving(self) -> None:
        """Who waits need not know where chunks end; and waits on where there is nothing to be read."""
        if self._buffer:
            super().end_http_chunk_receiving()


async def read(content: StreamReader, take: Take | None) -> bytes:
    """Whatever has arrived, at least one byte, of which `take` did not deal with what it was offered; `b""` at the end.
    Raises what aiohttp does."""
    if take is None or type(content) not in (StreamReader, Passing) or content._buffer or content._eof:
        return await content.readany()
    content.__class__ = Passing
    protocol = content._protocol
    protocol.take = take  # type: ignore[attr-defined]
    try:
        return await content.readany()
    finally:
        protocol.take = None  # type: ignore[attr-defined]
