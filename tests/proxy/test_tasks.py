"""Tasks end even when they lose a cancellation."""

from __future__ import annotations

import asyncio

from proxy.tasks import end


def test_a_lost_cancellation() -> None:
    async def deaf() -> None:
        for _ in range(2):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue
        await asyncio.sleep(60)

    async def failing() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        tasks = [asyncio.create_task(work) for work in (deaf(), deaf(), failing())]
        await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            await end(*tasks)
            await end()
        assert [task.cancelled() for task in tasks] == [True, True, False]
        assert isinstance(tasks[2].exception(), ZeroDivisionError)

    asyncio.run(main())
