"""Counts the bytes between the proxy and a backend: a relay of sockets that is in the way only while it counts."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from urllib.parse import urlsplit


class Forwarder:
    """Passes connections on to a backend; an asynchronous context manager.

    Attributes:
        url: where to ask, in place of the backend.
        up, down: bytes so far to the backend, and from it.
    """

    def __init__(self, upstream: str, port: int) -> None:
        parts = urlsplit(upstream)
        self._to = parts.hostname or "127.0.0.1", parts.port or 80
        self._port = port
        self._open: set[asyncio.StreamWriter] = set()
        self.url = f"http://127.0.0.1:{port}{parts.path}"
        self.up = self.down = 0

    async def __aenter__(self) -> Forwarder:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._server.close()
        for writer in [*self._open]:
            writer.close()
        await asyncio.sleep(0.05)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back, forth = await asyncio.open_connection(*self._to)
        except OSError:
            writer.close()
            return
        self._open |= {writer, forth}
        try:
            await asyncio.gather(self._pass(reader, forth, up=True), self._pass(back, writer, up=False))
        finally:
            self._open -= {writer, forth}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if up:
                    self.up += len(data)
                else:
                    self.down += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()
