"""Work off the event loop: others go on meanwhile, and who is cancelled leaves nothing behind that still runs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from proxy.relay.aside import aside


async def test_it_returns_and_raises_what_the_work_does() -> None:
    assert await aside(lambda: threading.current_thread() is not threading.main_thread())
    with pytest.raises(ZeroDivisionError):
        await aside(lambda: 1 / 0)


@pytest.mark.parametrize("cancels", [1, 3])
async def test_cancelled_it_waits_until_the_work_is_over(cancels: int) -> None:
    begun, go_on = threading.Event(), threading.Event()
    ended: list[bool] = []

    def work() -> None:
        begun.set()
        go_on.wait()
        ended.append(True)
        raise ValueError("nobody hears of it")

    task = asyncio.create_task(aside(work))
    await asyncio.to_thread(begun.wait)
    for _ in range(cancels):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
    assert task.cancelling() == cancels
