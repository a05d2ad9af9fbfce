"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN = 0.1
"""Seconds after which somebody who still runs is cancelled once more."""


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they are over; what they raise is left in them.

    Once is not enough: `asyncio.wait_for` of Python 3.11, which redis-py writes with, loses a cancellation that arrives
    just as what it waits for is done.
    """
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=AGAIN)
