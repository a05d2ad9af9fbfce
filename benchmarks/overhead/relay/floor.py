"""The least that anything between client and backend costs here: a TCP forwarder that looks at nothing.

`python -m benchmarks.overhead.relay.floor HOST PORT` prints its own port and serves until it is told to stop.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from typing import cast

import uvloop


class _Side(asyncio.Protocol):
    """One end. What comes here goes to the other one, as soon as there is one."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: asyncio.Transport | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are not of asyncio's class.
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early.append(data)
        else:
            self.other.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            self.other.close()

    def join(self, other: asyncio.Transport) -> None:
        """From here on it goes there."""
        self.other = other
        for data in self._early:
            other.write(data)
        self._early = []


class _Front(_Side):
    """The client's end. It has a connection to the backend of its own, opened as soon as the client's is."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self._address = host, port
        self._joining: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._joining = asyncio.get_running_loop().create_task(self._join())

    async def _join(self) -> None:
        made, back = await asyncio.get_running_loop().create_connection(_Side, *self._address)
        if self.transport is None or self.transport.is_closing():
            made.close()
            return
        back.join(self.transport)
        self.join(made)


async def _serve(host: str, port: int) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    server = await loop.create_server(lambda: _Front(host, port), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await stop.wait()
    server.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM."""
    host, port = sys.argv[1:] if argv is None else argv
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(host, int(port)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
