"""A scripted backend on a raw socket: exact bytes, exact boundaries, exact timing, and notes of what it saw."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from tests.support.waiting import PATIENCE


@dataclass(frozen=True)
class Close:
    """End the connection, with a FIN or (`reset`) with an RST."""

    reset: bool = False


@dataclass(frozen=True)
class Until:
    """Wait until the test sets the event."""

    event: threading.Event


@dataclass(frozen=True)
class PeerCloses:
    """Wait until the other side has closed."""


Step = bytes | float | Close | Until | PeerCloses
"""Bytes are written (and flushed) as they are; a number is a pause in seconds."""


@dataclass
class Received:
    """One request as it arrived. Times are on the monotonic clock."""

    line: bytes
    headers: dict[bytes, bytes]
    raw_headers: bytes
    body: bytes
    connection: int
    at: float
    sent: list[float] = field(default_factory=list)
    peer_closed: threading.Event = field(default_factory=threading.Event)
    peer_closed_at: float = 0.0


Script = Sequence[Step] | Callable[[Received], Sequence[Step]]


class FakeBackend:
    """A context manager that serves `script` to every request, or the scripts of `queue` one after the other.

    Attributes:
        pages: bodies (JSON) for GET requests by path, which then are neither scripted nor noted.
        connections, open: connections so far, and now.
        busy: requests whose script is not over.
    """

    def __init__(self, script: Script = (), *, port: int = 0, pages: Mapping[bytes, bytes] | None = None) -> None:
        self.script = script
        self.queue: list[Script] = []
        self.requests: list[Received] = []
        self.pages = pages or {}
        self.connections = self.open = self.busy = 0
        self.port = port
        self._loop = asyncio.new_event_loop()
        self._transports: set[asyncio.Transport] = set()
        self._up = threading.Event()
        self._over: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def last(self) -> Received:
        """The latest request."""
        return self.requests[-1]

    def reset(self) -> None:
        """Forget scripts and requests."""
        self.script, self.queue, self.requests = (), [], []

    def __enter__(self) -> FakeBackend:
        self._thread.start()
        assert self._up.wait(PATIENCE)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._over is not None
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        server = await self._loop.create_server(self._protocol, "127.0.0.1", self.port, backlog=2048)
        self.port = server.sockets[0].getsockname()[1]
        self._up.set()
        await self._over.wait()
        await close(server)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for transport in list(self._transports):
            transport.abort()
        await turns()

    def _protocol(self) -> _Connection:
        connection = _Connection(asyncio.StreamReader(loop=self._loop), self._accept, self._loop)
        connection.transports = self._transports
        return connection

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        number = self.connections
        connection = writer.transport.get_protocol()
        assert isinstance(connection, _Connection)
        try:
            while (request := await _read(reader, number)) is not None:
                if (page := self._page(request)) is not None:
                    writer.write(b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\n")
                    writer.write(b"content-length: %d\r\n\r\n%s" % (len(page), page))
                elif not await self._answer(request, connection, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.open -= 1
            writer.close()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await writer.wait_closed()

    def _page(self, request: Received) -> bytes | None:
        method, path, _ = request.line.split(b" ", 2)
        return self.pages.get(path) if method == b"GET" else None

    async def _answer(self, request: Received, connection: _Connection, writer: asyncio.StreamWriter) -> bool:
        self.requests.append(request)
        script = self.queue.pop(0) if self.queue else self.script
        self.busy += 1
        connection.request = request
        try:
            return await _play(script(request) if callable(script) else script, request, writer)
        finally:
            connection.request = None
            self.busy -= 1


class _Connection(asyncio.StreamReaderProtocol):
    """Notes when the other side closes. Requests are not pipelined here, so any end of input is a close."""

    request: Received | None = None
    transports: set[asyncio.Transport]
    own: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It begins."""
        assert isinstance(transport, asyncio.Transport)
        self.own = transport
        self.transports.add(transport)
        super().connection_made(transport)

    def eof_received(self) -> bool | None:
        """A FIN."""
        self._gone()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """An RST, or our own end."""
        if self.own is not None:
            self.transports.discard(self.own)
        self._gone()
        super().connection_lost(exc)

    def _gone(self) -> None:
        if self.request is not None and not self.request.peer_closed.is_set():
            self.request.peer_closed_at = time.monotonic()
            self.request.peer_closed.set()


async def _read(reader: asyncio.StreamReader, connection: int) -> Received | None:
    head = await reader.readuntil(b"\r\n\r\n")
    line, *rows = head[:-4].split(b"\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (row.partition(b":") for row in rows)}
    chunked = headers.get(b"transfer-encoding", b"").lower() == b"chunked"
    body = await (_read_chunks(reader) if chunked else reader.readexactly(int(headers.get(b"content-length", b"0"))))
    return Received(line, headers, b"\r\n".join(rows), body, connection, time.monotonic())


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return body


async def _play(steps: Sequence[Step], request: Received, writer: asyncio.StreamWriter) -> bool:
    """Act the script; false when the connection is over."""
    try:
        for step in steps:
            match step:
                case bytes():
                    request.sent.append(time.monotonic())
                    writer.write(step)
                    await writer.drain()
                case Close(reset):
                    if reset:
                        writer.transport.abort()
                    return False
                case Until(event):
                    await _poll(event.is_set)
                case PeerCloses():
                    await _poll(request.peer_closed.is_set)
                    return False
                case _:
                    await asyncio.sleep(step)
        return not request.peer_closed.is_set()
    except ConnectionError:
        if not request.peer_closed.is_set():
            request.peer_closed_at = time.monotonic()
            request.peer_closed.set()
        return False


async def close(server: asyncio.Server) -> None:
    """Accept nobody any more. asyncio forgets whom it accepts in the moment of a close, with an open socket, so those
    come first."""
    for listening in server.sockets:
        asyncio.get_running_loop().remove_reader(listening.fileno())
    await turns()
    server.close()


async def turns() -> None:
    """Let the loop do what is to be done by now, and what follows from it."""
    for _ in range(10):
        await asyncio.sleep(0)


async def _poll(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - set by other threads
        await asyncio.sleep(0.002)
