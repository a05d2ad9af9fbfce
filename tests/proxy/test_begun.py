from __future__ import annotations

import asyncio

import pytest

from proxy.begun import Begun


async def test_what_need_not_wait_is_done_at_once() -> None:
    async def answer() -> int:
        return 7

    begun = Begun(answer())
    assert begun.done
    assert begun.result == 7
    assert await begun == 7
    assert await begun == 7


async def test_what_fails_at_once_fails_where_it_is_begun() -> None:
    async def fail() -> None:
        raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        Begun(fail())


async def test_it_runs_before_it_is_awaited() -> None:
    seen: list[str] = []
    gate: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def work() -> int:
        seen.append("began")
        found = await gate
        await asyncio.sleep(0)
        return found

    begun = Begun(work())
    assert seen == ["began"]
    assert not begun.done
    gate.set_result(3)
    assert await begun == 3


async def test_errors_after_a_wait() -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise ValueError("later")

    begun = Begun(work())
    with pytest.raises(ValueError, match="later"):
        await begun


async def test_its_time_out_counts_from_its_beginning() -> None:
    async def work() -> str:
        try:
            async with asyncio.timeout(0.02):
                await asyncio.sleep(30)
        except TimeoutError:
            return "too late"
        return "in time"

    assert await Begun(work()) == "too late"
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_a_cancelled_task_cancels_it() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()

    async def run() -> None:
        await Begun(work())

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
