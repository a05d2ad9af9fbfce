"""Where the time of one request went, and how long it may still wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from policies.errors import UpstreamTimeout
from policies.settings import TimeoutSettings

T = TypeVar("T")


class Clock:
    """Counts the seconds spent waiting for others; the rest of the total is ours.

    `first_token` and `total` are seconds after the request went up (the last time), None before. The total time-out
    counts from the first time: asking another backend gives a request no second one. `when_began` is called when an
    answer begins.
    """

    def __init__(self, timeouts: TimeoutSettings) -> None:
        self._timeouts = timeouts
        self._began = time.monotonic()
        self._over: float | None = None
        self._up: float | None = None
        self._first: float | None = None
        self._last: float | None = None
        self.waited = 0.0
        self.when_began: Callable[[], None] | None = None

    def went_up(self) -> None:
        """The request goes to a backend now; the time-outs for its first byte and between reads count from here."""
        self._up = time.monotonic()
        self._first = self._last = None
        if self._over is None:
            self._over = self._up + self._timeouts.total

    @property
    def left(self) -> float:
        """Seconds until the total time-out."""
        return self._timeouts.total if self._over is None else self._over - time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the request came in."""
        return time.monotonic() - self._began

    @property
    def overhead(self) -> float:
        """Seconds the proxy itself took so far."""
        return max(0.0, self.elapsed - self.waited)

    @property
    def first_token(self) -> float | None:
        """Seconds from going up to what began the answer: its first byte, or the first event with data."""
        return None if self._first is None or self._up is None else self._first - self._up

    @property
    def total(self) -> float | None:
        """Seconds from going up to the last read."""
        return None if self._last is None or self._up is None else self._last - self._up

    async def waiting(self, what: Awaitable[T]) -> T:
        """Wait for somebody else, without charging it to us."""
        start = time.monotonic()
        try:
            return await what
        finally:
            self.waited += time.monotonic() - start

    async def reading(self, what: Awaitable[bytes], deadline: asyncio.Timeout) -> bytes:
        """One read from the backend; moves the deadline to when this read must be over, and away afterwards."""
        assert self._up is not None
        assert self._over is not None
        start = time.monotonic()
        wait = self._up + self._timeouts.first_byte if self._first is None else start + self._timeouts.idle
        loop_offset = asyncio.get_running_loop().time() - start
        deadline.reschedule(min(wait, self._over) + loop_offset)
        data = await what
        deadline.reschedule(None)
        self._last = time.monotonic()
        self.waited += self._last - start
        return data

    def began(self) -> None:
        """What was read last began the answer; from here `idle` counts."""
        if self._first is None:
            self._first = self._last
            if self.when_began is not None:
                self.when_began()

    @asynccontextmanager
    async def patience(self, seconds: float | None = None) -> AsyncIterator[asyncio.Timeout]:
        """A deadline around talk with a backend. Raises UpstreamTimeout when it passes."""
        try:
            async with asyncio.timeout(seconds) as deadline:
                yield deadline
        except TimeoutError as error:
            raise UpstreamTimeout("the backend did not answer in time") from error
