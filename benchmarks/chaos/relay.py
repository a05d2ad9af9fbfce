"""A TCP relay between two processes that can be cut, or swallow everything as a broken network does."""

from __future__ import annotations

import asyncio
import socket
import struct

OPEN = "open"
CUT = "cut"
BLACKHOLE = "blackhole"
_AT_ONCE = struct.pack("ii", 1, 0)


class Relay:
    """Listens on a port of its own and passes bytes on to `target` on this machine.

    Cut, it resets every connection and each new one at once. As a black hole it accepts and says nothing; when the
    network is whole again, what was under way arrives late, as it would by TCP's own retransmission.
    """

    def __init__(self, target: int) -> None:
        self.port = 0
        self._target = target
        self._state = OPEN
        self._server: asyncio.Server | None = None
        self._ends: set[_End] = set()

    @property
    def whole(self) -> bool:
        """Whether bytes pass."""
        return self._state == OPEN

    async def start(self) -> None:
        """Listen; `port` is known then."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _End(self), "127.0.0.1", 0, backlog=256)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Stop listening and end every connection."""
        self._state = CUT
        if self._server is not None:
            self._server.close()
        self._reset()

    def cut(self) -> None:
        """Reset everything, now and until `heal`."""
        self._state = CUT
        self._reset()

    def swallow(self) -> None:
        """Pass nothing on, until `heal`."""
        self._state = BLACKHOLE
        for end in self._ends:
            end.hold()

    def heal(self, *, reset: bool = False) -> None:
        """Pass bytes again; `reset` ends the connections that were under way, as a firewall that forgot them does."""
        self._state = OPEN
        if reset:
            self._reset()
        for end in list(self._ends):
            end.release()

    def _reset(self) -> None:
        for end in list(self._ends):
            end.abort()


class _End(asyncio.Protocol):
    """One side of a connection; `other` is the side towards the target, or towards the client."""

    def __init__(self, relay: Relay, other: _End | None = None) -> None:
        self._relay = relay
        self._other = other
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._relay._ends.add(self)
        if self._relay._state == CUT or self._over:
            _reset(transport)
            return
        if self._relay._state == BLACKHOLE:
            # Not at once: older versions of asyncio begin to read after this call, paused or not.
            asyncio.get_running_loop().call_soon(self._hold_in_the_hole)
        for data in self._early:
            transport.write(data)
        self._early.clear()
        if self._other is None:
            self._other = _End(self._relay, self)
            self._dialling = asyncio.ensure_future(self._dial(self._other))

    def data_received(self, data: bytes) -> None:
        assert self._other is not None
        self._other.send(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._relay._ends.discard(self)
        self._transport = None
        if self._other is not None:
            self._other.close()

    def send(self, data: bytes) -> None:
        if self._transport is None:
            self._early.append(data)
        else:
            self._transport.write(data)

    def _hold_in_the_hole(self) -> None:
        if self._relay._state == BLACKHOLE:
            self.hold()

    def hold(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def release(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def close(self) -> None:
        self._over = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        self._over = True
        if self._transport is not None:
            _reset(self._transport)

    async def _dial(self, other: _End) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: other, "127.0.0.1", self._relay._target)
        except OSError:
            self.abort()


def _reset(transport: asyncio.Transport) -> None:
    """End a connection with an RST."""
    end = transport.get_extra_info("socket")
    if end is not None and end.fileno() >= 0:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    transport.abort()
