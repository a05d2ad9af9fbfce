"""Where the time of one request went, and how long it may still wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

from policies.errors import UpstreamTimeout
from policies.settings import TimeoutSettings

T = TypeVar("T")

_AGAIN = 0.1
"""Seconds after which it is looked again whether a request whose time is over waits for its client."""


class Deadline:
    """A deadline around talk with a backend; an async context manager that raises UpstreamTimeout when it passes.

    It moves with every read, thousands of times a second in all: so its timer is left alone, and asks when it rings
    what the deadline is by then.
    """

    __slots__ = ("_cancelling", "_due", "_loop", "_over", "_rings", "_task", "_timer")

    def __init__(self, seconds: float | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._timer: asyncio.TimerHandle | None = None
        self._rings = math.inf
        self._over = False
        self._due: float | None = None
        self.until(None if seconds is None else time.monotonic() + seconds)

    async def __aenter__(self) -> Deadline:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._due = None
        if self._timer is not None:
            self._timer.cancel()
        # A client that left meanwhile has cancelled the task, too.
        if self._over and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise UpstreamTimeout("the backend did not answer in time") from error

    def until(self, when: float | None) -> None:
        """Move the deadline (seconds on the monotonic clock), or take it away."""
        self._due = when
        if when is not None and when < self._rings:
            self._wind(when)

    def _wind(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings = when
        self._timer = self._loop.call_later(max(0.0, when - time.monotonic()), self._ring)

    def _ring(self) -> None:
        self._timer, self._rings = None, math.inf
        if self._due is None:
            return
        if self._due > time.monotonic():
            self._wind(self._due)
            return
        self._over = True
        self._task.cancel()


class Limit:
    """The end of a request whose client does not take its bytes; a context manager around all of it.

    Reads have a Deadline of their own. What else a request waits for is bounded by itself, except for its client:
    when the time is over and a write is not, or as soon as one is not after that, the work is cancelled and the context
    left quietly, with `cut` set. One timer for a request; none for a write.
    """

    __slots__ = ("_cancelling", "_clock", "_seconds", "_task", "_timer", "cut")

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.cut = False
        self._clock = clock
        self._seconds = seconds

    def __enter__(self) -> Limit:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._ring)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        self._timer.cancel()
        # Each knows the other: both would stay until garbage is collected.
        self._clock.unlimited()
        # A client that left meanwhile has cancelled the task, too.
        return self.cut and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError

    def give_up(self) -> None:
        """The client is to blame: end it."""
        self.cut = True
        self._task.cancel()

    def _ring(self) -> None:
        if self._clock.writing_now:
            self.give_up()
        else:
            self._timer = asyncio.get_running_loop().call_later(_AGAIN, self._ring)


class Clock:
    """Counts the seconds spent waiting for others; the rest of the total is ours.

    `first_token` and `total` are seconds after the request went up (the last time), None before. The total time-out
    counts from the beginning: neither another backend nor a queue gives a request a second one. `when_began` is called
    when an answer begins.

    Attributes:
        waited: seconds spent waiting for others.
        writing_now: the client has to take bytes before anything goes on.
        shown: seconds until the answer's first bytes went to the client, None before; `shown_overhead`: those of them
            that the proxy itself took.
    """

    def __init__(self, timeouts: TimeoutSettings) -> None:
        self._timeouts = timeouts
        self._began = time.monotonic()
        self._over = self._began + timeouts.total
        self._held = self._since = 0.0
        self._limit: Limit | None = None
        self._up: float | None = None
        self._first: float | None = None
        self._last: float | None = None
        self.when_began: Callable[[], None] | None = None
        self.waited = 0.0
        self.writing_now = False
        self.shown: float | None = None
        self.shown_overhead = 0.0

    def went_up(self) -> None:
        """The request goes to a backend now; the time-outs for its first byte and between reads count from here."""
        self._up = time.monotonic()
        self._first = self._last = None
        self._held = 0.0

    @property
    def left(self) -> float:
        """Seconds until the total time-out."""
        return self._over - time.monotonic()

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

    async def holding(self, what: Awaitable[None]) -> None:
        """Wait for what an answer waits for that is here already: the backend's seconds go on after it."""
        start = time.monotonic()
        await what
        if self._up is not None:
            self._up += time.monotonic() - start

    async def writing(self, what: Awaitable[None]) -> None:
        """Wait for the client to take bytes; the backend is not to blame for how long that takes."""
        start = time.monotonic()
        self.writing_now = True
        try:
            await what
        finally:
            self.writing_now = False
            took = time.monotonic() - start
            self.waited += took
            self._held += took

    async def reading(self, what: Awaitable[bytes], deadline: Deadline) -> bytes:
        """One read from the backend; moves the deadline to when this read must be over, and away afterwards."""
        assert self._up is not None
        self._since = start = time.monotonic()
        wait = self._up + self._held + self._timeouts.first_byte if self._first is None else start + self._timeouts.idle
        deadline.until(min(wait, self._over))
        data = await what
        deadline.until(None)
        self._last = time.monotonic()
        self.waited += self._last - self._since
        return data

    def passed(self, arrived: float, deadline: Deadline) -> None:
        """What arrived then was dealt with, while `reading` waits on: for more of it from here on."""
        self._last = arrived
        self.waited += arrived - self._since
        self._since = time.monotonic()
        deadline.until(min(self._since + self._timeouts.idle, self._over))

    def began(self) -> None:
        """What was read last began the answer; from here `idle` counts."""
        if self._first is None:
            self._first = self._last
            if self.when_began is not None:
                self.when_began()

    def showing(self) -> None:
        """The answer's first bytes go to the client now."""
        self.shown = self.elapsed
        self.shown_overhead = max(0.0, self.shown - self.waited)

    def limit(self) -> Limit:
        """The total time-out where a client does not take its bytes, in the task that serves it."""
        self._limit = Limit(self, self.left)
        return self._limit

    def unlimited(self) -> None:
        """The context of `limit` is left."""
        self._limit = None

    async def blame(self) -> None:
        """A read was not over in time. Where the total is over, and more of it went by with the client than with the
        backend, it is the client's doing, and the request ends as in Limit."""
        assert self._limit is not None
        assert self._up is not None
        if self.left <= 0 and self._held > (time.monotonic() - self._up) / 2:
            self._limit.give_up()
            # The end comes at the next wait.
            await asyncio.sleep(0)

    def deadline(self, seconds: float | None = None) -> Deadline:
        """A deadline around talk with a backend, in the task that talks."""
        return Deadline(seconds)
