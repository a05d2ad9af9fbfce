"""What comes on a connection to a backend: one answer to each request, and nothing that nobody asked for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from aiohttp import StreamReader
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError

_END_OF_HEAD = re.compile(rb"\n\r?\n")
_SEAM = 2
"""Bytes of the longest end of a head, less one."""
_INFORMATIONAL = range(100, 200)


class Incoming(ResponseHandler):
    """aiohttp's side of a connection, with an eye on where an answer ends.

    An answer that is here whole is one, whatever follows it: aiohttp loses those whose head came in one read with what
    is no HTTP, so a head is fed to it by itself. What follows, and what comes while no request is on its way, closes
    the connection: it would pass for the answer to the next one, and could be endless. `unasked` is told of it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, unasked: Callable[[], None]) -> None:
        super().__init__(loop)
        self._unasked = unasked
        self._answer: StreamReader | None = None
        self._seam = b""
        self._told = False

    def set_response_params(self, **options: Any) -> None:
        """A request goes up next."""
        self._answer, self._seam = None, b""
        super().set_response_params(**options)

    def data_received(self, data: bytes) -> None:
        """Bytes from the backend; none where there is more of what is here already."""
        if data:
            if self._parser is None or self._over:
                self._end()
                return
            if self._answer is None and not (data := self._heads(data)):
                return
        super().data_received(data)

    def feed_data(self, data: Any, size: int = 0) -> None:
        """A head that was read, and the body that belongs to it."""
        message, payload = data
        if self._answer is not None:
            self._end()
            return
        if message.code not in _INFORMATIONAL:
            self._answer = payload
        super().feed_data(data, size)

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        """What came is no HTTP, or the connection is gone."""
        if isinstance(exc, HttpProcessingError):
            if self._over:
                self._tell()
            elif self._answer is not None:
                # Else whoever reads it would wait for the rest of it.
                self._answer.set_exception(exc)
        super().set_exception(exc, *cause)

    @property
    def _over(self) -> bool:
        return self._answer is not None and self._answer.is_eof()

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            self._unasked()

    def _end(self) -> None:
        self._tell()
        self.force_close()
        self.close()

    def _heads(self, data: bytes) -> bytes:
        """Feed the heads that end here; returns what follows that of the answer, or is part of one."""
        while data and self._answer is None:
            found = _END_OF_HEAD.search(self._seam + data)
            if found is None:
                self._seam = (self._seam + data)[-_SEAM:]
                break
            end = found.end() - len(self._seam)
            self._seam = b""
            super().data_received(data[:end])
            data = data[end:]
        return data


def rest_of(content: StreamReader) -> bytes:
    """What is here of a body that broke off, and has not been read."""
    return bytes(content._read_nowait(-1)) if content._buffer else b""
