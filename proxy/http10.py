"""Answers to HTTP/1.0, which knows no chunks: where their length is not known they end with the connection."""

from __future__ import annotations

import asyncio
import socket
import struct

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

VERSION = "1.0"


class UntilClosed(RequestResponseCycle):
    """Uvicorn's cycle, which would send chunks all the same."""

    _sized = True

    async def send(self, message: Message) -> None:  # type: ignore[override]
        """Send the head, or a part of the body."""
        if message["type"] == "http.response.start":
            self._sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._sized:
                self.chunked_encoding = False
        elif not self._sized:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)  # type: ignore[arg-type]


def reset(transport: asyncio.Transport) -> None:
    """Close a connection so that nobody takes that for the end of its answer."""
    found = transport.get_extra_info("socket")
    if found is not None and not transport.is_closing():
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
