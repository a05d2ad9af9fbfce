"""Work that takes long, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from proxy.tap.base import LARGE

T = TypeVar("T")


async def aside(work: Callable[[], T]) -> T:
    """What `work` returns, in a thread. Cancelled, it waits for that all the same: nobody else may touch meanwhile what
    the thread works on."""
    running = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
    if cancelled is not None:
        running.exception()
        raise cancelled
    return running.result()


async def sized(size: int, work: Callable[[], T]) -> T:
    """What `work` on so many bytes returns; aside where they are many, for others' streams would stand still."""
    return work() if size <= LARGE else await aside(work)
