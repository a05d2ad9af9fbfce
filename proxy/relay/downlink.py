"""The client's end of one answer: its head, its bytes, and a comment now and then while a stream is silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from starlette.types import Message, Send

from proxy.relay.clock import Clock

Headers = Sequence[tuple[bytes, bytes]]
PassOn = Callable[[bytes | None], bool]
PASS_ON = "countersign.pass_on"
"""ASGI extension: `now` is called with a part of the body that is not its last. Returns whether it was sent: not where
that had to wait for the client, nor before the head or after the end. Without a part it says whether one would be."""
PING = b": countersign-ping\n\n"
"""A backend's own comments pass; one that says `countersign` does not (`proxy.tap.forged`)."""
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def _nothing() -> None:
    return None


class Downlink:
    """Writes one answer.

    Attributes:
        status: what the client got, 0 before that.
        delivered: nothing more will be sent; a client that leaves now is not one that left early.
        pinged: the head went out with a keep-alive comment, before anything was known of the answer, which can only be
            a stream from there on.
        over: called when it is known what is sent last, and before the client can have it: once it does, its next
            request may be here already.
    """

    def __init__(self, send: Send, clock: Clock, keepalive: float, pass_on: PassOn | None = None) -> None:
        self.status = 0
        self.delivered = False
        self.pinged = False
        self.over: Callable[[], None] = _nothing
        self.send = send
        self._clock = clock
        self._keepalive = keepalive
        self._pass_on = pass_on
        # Without comments there is only one writer.
        self._turn = asyncio.Lock() if keepalive else None
        self._spoke = asyncio.get_running_loop().time()
        self._events = True

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head, unless a keep-alive comment had to."""
        if self.status:
            return
        self.status = status
        self._events = any(
            name == b"content-type" and value.lower().startswith(b"text/event-stream") for name, value in headers
        )
        await self._clock.writing(self._say({"type": "http.response.start", "status": status, "headers": headers}))

    def hush(self) -> None:
        """The answer turns out to be no stream: no comments, unless the client has been promised one."""
        self._events = self.pinged

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send bytes; `last` ends the answer."""
        if last:
            self.close()
        if self._clock.shown is None:
            self._clock.showing()
        message = {"type": "http.response.body", "body": data, "more_body": not last}
        await self._clock.writing(self.send(message) if self._turn is None else self._say(message))

    def close(self) -> None:
        """What is sent next is the last."""
        self.delivered = True
        self.over()

    @property
    def ready(self) -> bool:
        """Whether `pass_on` would send something now, which needs a client that takes it and nobody else who writes."""
        return self._pass_on is not None and self._turn is None and not self.delivered and self._pass_on(None)

    def pass_on(self, data: bytes) -> None:
        """As `write`, at once; where `ready`."""
        assert self._pass_on is not None
        self._pass_on(data)

    @contextmanager
    def kept_alive(self, stream: bool, headers: Callable[[Headers], Headers]) -> Iterator[None]:
        """While this lasts a client that asked for a stream never waits longer than `keepalive` for some bytes.

        Args:
            headers: makes the head, given the content type.
        """
        if not stream or not self._keepalive:
            yield
            return
        pinging = asyncio.create_task(self._ping(headers))
        try:
            yield
        finally:
            pinging.cancel()

    async def _ping(self, headers: Callable[[Headers], Headers]) -> None:
        loop = asyncio.get_running_loop()
        assert self._turn is not None
        while self._events and not self.delivered:
            left = self._spoke + self._keepalive - loop.time()
            if left > 0:
                await asyncio.sleep(left)
                continue
            async with self._turn:
                if self.delivered or not self._events or self._spoke + self._keepalive > loop.time():
                    continue
                if not self.status:
                    self.status, self.pinged = 200, True
                    await self.send({"type": "http.response.start", "status": 200, "headers": headers(_EVENTS)})
                await self.send({"type": "http.response.body", "body": PING, "more_body": True})
                self._spoke = loop.time()

    async def _say(self, message: Message) -> None:
        if self._turn is None:
            await self.send(message)
            return
        async with self._turn:
            await self.send(message)
            self._spoke = asyncio.get_running_loop().time()
