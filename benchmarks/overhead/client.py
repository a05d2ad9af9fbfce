"""The measuring client: raw sockets, a time stamp for every read, nothing parsed while the clock runs."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from benchmarks.overhead.wire import Read, Response, parse


@dataclass(frozen=True, slots=True)
class Target:
    """One arm: where the request goes and what it says."""

    name: str
    url: str
    body: bytes
    headers: Mapping[str, str]

    def request(self) -> bytes:
        """The request as it goes to the socket."""
        parts = urlsplit(self.url)
        lines = [f"POST {parts.path} HTTP/1.1", f"host: {parts.netloc}", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines.append(f"content-length: {len(self.body)}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + self.body

    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or (443 if self.secure else 80)

    @property
    def secure(self) -> bool:
        """Whether it is asked over TLS."""
        return self.url.startswith("https:")


@dataclass(frozen=True, slots=True)
class Timed:
    """One request's outcome. Times are seconds from the moment the request was due, not from when it was sent."""

    due: float
    response: Response | None
    error: str = ""

    @property
    def id(self) -> str:
        """The proxy's id of the response; empty when it gave none."""
        return self.response.headers.get("x-countersign-id", "") if self.response else ""


_LAST = b"\r\n0\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_LEAD = 0.05
"""Seconds before a request is due at which its connection is opened."""


def _missing(data: bytes) -> int | None:
    """Bytes that are not there yet of an answer that begins so and says its length; None of one that does not."""
    head, end, body = data.partition(b"\r\n\r\n")
    said = _LENGTH.search(head) if end else None
    return None if said is None else int(said[1]) - len(body)


class _Connection(asyncio.Protocol):
    """Sends one request and collects what comes back."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self._missing: int | None = None
        self.reads: list[Read] = []
        self.done: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.reads.append((self._loop.time(), data))
        self._tail = (self._tail + data)[-7:]
        if len(self.reads) == 1:
            self._missing = _missing(data)
        elif self._missing is not None:
            self._missing -= len(data)
        if (self._tail == _LAST or self._missing == 0) and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def burst(
    target: Target,
    offsets: Sequence[float] | NDArray[np.floating],
    patience: float,
    meanwhile: Sequence[tuple[float, Callable[[], None]]] = (),
) -> list[Timed]:
    """Send one request per offset (seconds from the start of the burst), each on a connection opened before.

    Requests leave at their own time whether or not earlier ones were answered, and latency counts from the
    time they were due, so that a stall is not hidden by the client waiting for it. Whatever is not answered
    within `patience` seconds counts as an error. What is to be done `meanwhile` has offsets of its own.
    """
    loop = asyncio.get_running_loop()
    host, port = target.address()
    connections = [(await loop.create_connection(_Connection, host, port))[1] for _ in offsets]
    request = target.request()
    # Let the other side finish accepting before the clock starts.
    start = loop.time() + 0.03
    for connection, offset in zip(connections, offsets, strict=True):
        loop.call_at(start + float(offset), connection.send, request)
    for offset, act in meanwhile:
        loop.call_at(start + offset, act)
    await asyncio.wait([connection.done for connection in connections], timeout=patience)
    for connection in connections:
        connection.close()
    return [_timed(connection, start + float(offset)) for connection, offset in zip(connections, offsets, strict=True)]


async def open_loop(
    targets: Sequence[Target], offsets: Sequence[float] | NDArray[np.floating], patience: float
) -> list[Timed]:
    """Send each request at its offset (seconds from now, ascending), whether or not earlier ones were answered.

    Latency counts from when a request was due, as in `burst`; connections are opened just before.
    """
    start = asyncio.get_running_loop().time() + 2 * _LEAD

    async def one(target: Target, due: float) -> Timed:
        await asyncio.sleep(due - _LEAD - asyncio.get_running_loop().time())
        return await _asked(target, due, patience)

    return await asyncio.gather(
        *(one(target, start + float(offset)) for target, offset in zip(targets, offsets, strict=True))
    )


async def closed_loop(targets: Sequence[Target], streams: int, patience: float) -> list[Timed]:
    """So many clients, each of which asks the next request as soon as it was answered; in the order of `targets`."""
    waiting: Iterator[tuple[int, Target]] = iter(enumerate(targets))
    found: dict[int, Timed] = {}

    async def client() -> None:
        for place, target in waiting:
            found[place] = await _asked(target, None, patience)

    await asyncio.gather(*(client() for _ in range(streams)))
    return [found[place] for place in range(len(targets))]


async def _asked(target: Target, due: float | None, patience: float) -> Timed:
    """One request on a connection of its own; without a time it is due as soon as that is open."""
    loop = asyncio.get_running_loop()
    host, port = target.address()
    context = ssl.create_default_context() if target.secure else None
    try:
        _, connection = await loop.create_connection(_Connection, host, port, ssl=context)
    except OSError as error:
        return Timed(loop.time() if due is None else due, None, f"no connection: {type(error).__name__}")
    due = loop.time() if due is None else due
    loop.call_at(due, connection.send, target.request())
    await asyncio.wait([connection.done], timeout=due - loop.time() + patience)
    connection.close()
    return _timed(connection, due)


def _timed(connection: _Connection, due: float) -> Timed:
    if not connection.done.done():
        return Timed(due, None, "timeout")
    try:
        return Timed(due, parse(connection.reads))
    except ValueError as error:
        return Timed(due, None, str(error))
