"""As much of an HTTP/1.1 server as a scripted process needs: requests with bodies in, bytes out, one after another."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import orjson

REASONS = {200: b"OK", 400: b"Bad Request", 403: b"Forbidden", 404: b"Not Found"}


@dataclass(frozen=True, slots=True)
class Request:
    """One request that has arrived in full."""

    method: str
    path: str
    body: bytes


Handler = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


def whole(value: object, status: int = 200) -> bytes:
    """A response with a JSON body."""
    body = orjson.dumps(value)
    head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, REASONS.get(status, b"X"), len(body)) + body


async def serve(handler: Handler, port: int = 0) -> asyncio.Server:
    """Listen on this machine only. `handler` writes the whole response; a client that leaves ends it."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read(reader)) is not None:
                await handler(request, writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    return await asyncio.start_server(accept, "127.0.0.1", port, backlog=1024)


async def run(handler: Handler, port: int) -> None:
    """Serve until SIGTERM."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = await serve(handler, port)
    await stop.wait()
    server.close()


async def _read(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    line, *rows = head.split(b"\r\n")
    method, path, _ = line.decode("latin-1").split(" ", 2)
    size = next((int(row.partition(b":")[2]) for row in rows if row.lower().startswith(b"content-length:")), 0)
    return Request(method, path, await reader.readexactly(size))
