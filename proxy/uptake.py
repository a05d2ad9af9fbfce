"""Clients that do not take what is sent to them are given up, where it can be seen: at their connection."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import math
import termios

from policies.settings import Settings, TimeoutSettings
from proxy.protocol import BoundedProtocol

_LOOKS = 10


class WatchedProtocol(BoundedProtocol):
    """A connection that is cut when its client takes nothing of what there is for it for `timeouts.client` seconds, or
    takes `timeouts.total` over it although nothing was added.

    To whoever serves the request, and to its backend, that is a client that left. Only a client that is behind is
    looked at: one whose answer has to wait for it, or that has not taken all of one that is out. In both cases nobody
    writes, so that what waits gets less exactly when the client takes bytes. Time is counted in looks of which each
    waits for the event loop to come round: one that stood still is not the client's fault.
    """

    timeouts = TimeoutSettings()

    _look_handle: asyncio.TimerHandle | None = None
    _looks = _in_vain = 0
    _left: float = math.inf

    def pause_writing(self) -> None:
        """More waits for the client than may wait."""
        super().pause_writing()
        self._watch()

    def on_response_complete(self) -> None:
        """An answer is out, as far as the client took it."""
        if self.transport.get_write_buffer_size():
            self._watch()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        if self._look_handle is not None:
            self._look_handle.cancel()
            self._look_handle = None
        super().connection_lost(exc)

    def _watch(self) -> None:
        self._left, self._looks, self._in_vain = math.inf, 0, 0
        if self._look_handle is None:
            self._look_handle = self.loop.call_later(self._step, self._look)

    @property
    def _step(self) -> float:
        return min(self.timeouts.client, self.timeouts.total) / _LOOKS

    def _look(self) -> None:
        self._look_handle = None
        waits = self.transport.get_write_buffer_size()
        if not waits:
            return
        if self.flow.write_paused or self._is_answered() or self.transport.is_closing():
            self._looks += 1
            left = waits + self._in_the_kernel()
            self._in_vain = 0 if left < self._left else self._in_vain + 1
            self._left = left
        else:
            self._left, self._looks, self._in_vain = math.inf, 0, 0
        if self._in_vain * self._step >= self.timeouts.client or self._looks * self._step >= self.timeouts.total:
            self.transport.abort()
        else:
            self._look_handle = self.loop.call_later(self._step, self._look)

    def _in_the_kernel(self) -> int:
        """Bytes that the kernel has taken and the client's has not confirmed: it takes more from us only when a third
        of its buffer is free, which a slow client needs minutes for."""
        count = array.array("i", [0])
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, count)
        return count[0]


def watched(settings: Settings) -> type[WatchedProtocol]:
    """The protocol with these bounds and time-outs, as uvicorn takes it."""
    return type("Watched", (WatchedProtocol,), {"bounds": settings.bounds, "timeouts": settings.timeouts})
