"""A time-out that an event loop which comes late itself does not cut short."""

from __future__ import annotations

import asyncio
from types import TracebackType

_TICKS = 20


class Patience:
    """As `asyncio.timeout`, counted in twenty steps of which each waits for the loop to come round: a loop that stood
    still meanwhile, for however long, has lost one of them, and first sees what arrived. Raises TimeoutError.
    """

    __slots__ = ("_handle", "_left", "_loop", "_scope", "_step")

    def __init__(self, seconds: float) -> None:
        self._step = seconds / _TICKS
        self._left = _TICKS
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(self._step, self._tick)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        await self._scope.__aexit__(kind, error, trace)

    def _tick(self) -> None:
        self._left -= 1
        if self._left:
            self._handle = self._loop.call_later(self._step, self._tick)
        else:
            self._scope.reschedule(self._loop.time())
