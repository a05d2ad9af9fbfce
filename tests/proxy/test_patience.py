"""A time-out that counts how often the event loop came round."""

from __future__ import annotations

import asyncio
import time

import pytest

from proxy.patience import Patience


def test_it_ends_in_time() -> None:
    async def test() -> None:
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            async with Patience(0.2):
                await asyncio.sleep(3600)
        assert time.monotonic() - started >= 0.2
        async with Patience(0.05):
            pass
        await asyncio.sleep(0.1)  # nothing is left that would cancel us

    asyncio.run(test())


def test_a_loop_that_stood_still_is_not_the_other_sides_silence() -> None:
    async def test() -> None:
        reader, writer = asyncio.StreamReader(), asyncio.get_running_loop()
        async with Patience(0.2):
            writer.call_later(0.01, time.sleep, 0.5)
            writer.call_later(0.02, reader.feed_data, b"an answer\n")
            assert await reader.readline() == b"an answer\n"

    asyncio.run(test())


def test_whoever_is_cancelled_is_not_late() -> None:
    async def wait() -> None:
        async with Patience(30):
            await asyncio.sleep(30)

    async def test() -> None:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(test())
