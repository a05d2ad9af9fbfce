"""A time-out that an event loop which comes late itself does not cut short."""

from __future__ import annotations

import asyncio
from types import TracebackType

_TICKS = 20


class Patience:
    """As `asyncio.timeout`, counted in twenty steps of which each waits for the loop to come round: a loop that stood
    still meanwhile, for however long, has lost one of them, and first sees what arrived. Raises TimeoutError.
    """

    __slots__ = ("_cancelling", "_handle", "_left", "_loop", "_over", "_step", "_task")

    def __init__(self, seconds: float) -> None:
        self._step = seconds / _TICKS
        self._left = _TICKS
        self._over = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(self._step, self._tick)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        # Somebody else may have cancelled the task, too.
        if self._over and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _tick(self) -> None:
        self._left -= 1
        if self._left:
            self._handle = self._loop.call_later(self._step, self._tick)
        else:
            self._over = True
            self._task.cancel()
