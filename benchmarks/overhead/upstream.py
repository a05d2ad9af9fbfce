"""The scripted backend: a raw socket server with exact timing, in a process of its own.

`python -m benchmarks.overhead.upstream` prints its port and serves until it is told to stop.
"""

from __future__ import annotations

import argparse
import asyncio
import select
import selectors
import signal
from collections.abc import Sequence

import orjson

from benchmarks.overhead.answer import MODEL, Ask, Script

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
MODELS = orjson.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "benchmark"}]})


class _PreciseSelector(selectors.EpollSelector):
    """epoll rounds time-outs up to milliseconds; select(2) does not, and one epoll is all it has to wait for."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            select.select([self.fileno()], [], [], timeout)
        return super().select(0)


def precise_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers keep microseconds, however many connections it has."""
    return asyncio.SelectorEventLoop(_PreciseSelector())


def chunk(data: bytes) -> bytes:
    """One chunk of HTTP/1.1 chunked transfer coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Plan:
    """When each token leaves: the first after `first` seconds, the others every `interval` seconds, unless the request
    has a pace of its own."""

    def __init__(self, script: Script, first: float, interval: float) -> None:
        self.script = script
        self.first = first
        self.interval = interval
        self._ready: dict[tuple[int, bool, bool], list[bytes]] = {}

    def pace(self, ask: Ask) -> tuple[float, float]:
        """Seconds to the first token of this answer, and between its tokens."""
        return ask.pace or (self.first, self.interval)

    def writes(self, ask: Ask) -> list[bytes]:
        """What goes to the socket at each token's time, built once per kind of request."""
        kind = (ask.tokens, ask.evidence, ask.usage)
        if kind not in self._ready:
            writes = [chunk(self.script.token(ask, index)) for index in range(ask.tokens)]
            writes[0] = HEAD + chunk(self.script.role(ask)) + writes[0]
            writes[-1] += b"".join(chunk(event + b"\n\n") for event in self.script.end(ask).split(b"\n\n") if event)
            writes[-1] += LAST
            self._ready[kind] = writes
        return self._ready[kind]


class Connection(asyncio.Protocol):
    """One client. Requests follow one another on a connection; there is no pipelining."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        arrived = self._loop.time()
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        if not end or len(rest) < (size := _content_length(head)):
            return
        self._received = rest[size:]
        if head.startswith(b"POST"):
            self._answer(Ask.read(rest[:size], self._plan.script.tokens), arrived)
        else:
            self._send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
            self._send(b"content-length: %d\r\n\r\n%b" % (len(MODELS), MODELS))

    def _answer(self, ask: Ask, arrived: float) -> None:
        first, interval = self._plan.pace(ask)
        self._step(self._plan.writes(ask), 0, arrived + first, interval)

    def _step(self, writes: list[bytes], index: int, due: float, interval: float) -> None:
        """Send one token at its time, then wait for the next; a late one delays no other."""
        if self._transport is None or index == len(writes):
            return

        def send() -> None:
            self._send(writes[index])
            self._step(writes, index + 1, due + interval, interval)

        self._loop.call_at(due, send)

    def _send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


async def serve(plan: Plan, host: str = "127.0.0.1", port: int = 0) -> asyncio.Server:
    """Listen; the caller closes the server."""
    return await asyncio.get_running_loop().create_server(lambda: Connection(plan), host, port, backlog=1024)


async def _run(plan: Plan, port: int) -> None:
    for tokens in {plan.script.tokens, 4}:
        for evidence in (False, True):
            plan.writes(Ask(tokens, evidence, evidence))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    server = await serve(plan, port=port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await stop.wait()
    server.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead.upstream", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the longest answer")
    parser.add_argument("--first-ms", type=float, default=20.0, help="time to the first token")
    parser.add_argument("--interval-ms", type=float, default=10.0, help="time between tokens")
    arguments = parser.parse_args(argv)
    plan = Plan(Script(arguments.tokens), arguments.first_ms / 1000, arguments.interval_ms / 1000)
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        runner.run(_run(plan, arguments.port))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
