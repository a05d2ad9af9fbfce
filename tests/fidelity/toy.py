"""Gateways with one fault each, and one without: what the cases of this suite have to tell from each other."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

from tests.support import wire
from tests.support.fake_backend import close, turns
from tests.support.waiting import PATIENCE

_ABANDONED = 500_000
"""Bytes of an answer after which it is a large one."""
_MANY = 30


@dataclass(frozen=True)
class Fault:
    """What is wrong with a gateway.

    Attributes:
        polls: seconds after which it looks again whether its client is there; 0 for one that is told.
        seldom: of so many connections it closes only one at once, and the others half a second late.
        blocks: seconds for which it does nothing else after many clients have left large answers.
        sleeps: seconds before the first bytes of an answer, or before its end, are passed on.
        at_the_end: which of both.
        one_by_one: seconds that it takes for each request before the next.
    """

    polls: float = 0.0
    seldom: int = 1
    blocks: float = 0.0
    sleeps: float = 0.0
    at_the_end: bool = False
    one_by_one: float = 0.0


class Toy:
    """A context manager: passes the bytes of one backend on, in a thread of the test's process."""

    def __init__(self, backend: str, fault: Fault) -> None:
        target = urlsplit(backend)
        self._backend = (target.hostname or "", target.port or 80)
        self._fault = fault
        self._left = self._abandoned = self._port = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._serving: list[asyncio.Future[None]] = []
        self._up, self._over = threading.Event(), asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._gate = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Toy:
        self._thread.start()
        assert self._up.wait(PATIENCE)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        self._loop.run_until_complete(self._listen())
        self._loop.close()

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=2048)
        self._port = server.sockets[0].getsockname()[1]
        self._up.set()
        await self._over.wait()
        await close(server)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # What has bytes left that nobody takes would outlive its loop.
        for writer in self._writers:
            writer.transport.abort()
        await turns()

    def _accept(self, client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self._serving.append(asyncio.ensure_future(self._serve(client, writer)))

    async def _serve(self, client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with contextlib.AsyncExitStack() as stack:
            # Whoever goes before it has asked, and the end of the toy, are no errors.
            stack.enter_context(contextlib.suppress(ConnectionError, EOFError, asyncio.CancelledError))
            stack.callback(writer.close)
            head = await client.readuntil(b"\r\n\r\n")
            sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            body = await client.readexactly(int(sizes[0].partition(b":")[2]) if sizes else 0)
            await self._take_on()
            backend, asking = await asyncio.open_connection(*self._backend)
            self._writers.append(asking)
            stack.callback(asking.close)
            asking.write(head + body)
            passed = [0]
            passing = asyncio.ensure_future(self._pass(backend, writer, passed))
            stack.callback(passing.cancel)
            await self._leaves(client)
            await self._clear(passed[0])

    async def _take_on(self) -> None:
        if self._fault.one_by_one:
            async with self._gate:
                await asyncio.sleep(self._fault.one_by_one)

    async def _pass(self, backend: asyncio.StreamReader, writer: asyncio.StreamWriter, passed: list[int]) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await backend.read(65536):
                if data.endswith(wire.LAST_CHUNK) if self._fault.at_the_end else not passed[0]:
                    await asyncio.sleep(self._fault.sleeps)
                passed[0] += len(data)
                writer.write(data)
                await writer.drain()
                if data.endswith(wire.LAST_CHUNK):
                    break
            writer.close()

    async def _leaves(self, client: asyncio.StreamReader) -> None:
        while self._fault.polls and not client.at_eof() and client.exception() is None:  # noqa: ASYNC110 - its fault
            await asyncio.sleep(self._fault.polls)
        with contextlib.suppress(ConnectionError):
            await client.read()

    async def _clear(self, passed: int) -> None:
        """What it does when a client has left."""
        self._left += 1
        if self._left % self._fault.seldom:
            await asyncio.sleep(0.5)
        if passed > _ABANDONED:
            self._abandoned += 1
            if self._abandoned % _MANY == 1:
                time.sleep(self._fault.blocks)  # noqa: ASYNC251 - its fault
