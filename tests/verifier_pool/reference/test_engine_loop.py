from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, Future

import pytest

from policies.errors import ReplayError
from tests.support.waiting import PATIENCE, ends
from verifier_pool.reference.engine_loop import LoopThread


async def forever(began: threading.Event, ended: threading.Event) -> None:
    began.set()
    try:
        await asyncio.sleep(1000)
    finally:
        ended.set()


async def number() -> int:
    return 7


def test_from_any_thread() -> None:
    thread = LoopThread("t")
    results: list[int] = []
    callers = [threading.Thread(target=lambda: results.append(thread.run(number()))) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [7] * 8
    thread.close()


def test_cancelling_the_future_cancels_the_work() -> None:
    thread, began, ended = LoopThread("t"), threading.Event(), threading.Event()
    future = thread.submit(forever(began, ended))
    assert began.wait(PATIENCE)
    assert future.cancel()
    assert ended.wait(PATIENCE)
    thread.close()


def test_what_runs_when_it_closes_ends() -> None:
    thread, began, ended = LoopThread("t"), threading.Event(), threading.Event()
    future = thread.submit(forever(began, ended))
    assert began.wait(PATIENCE)
    thread.close()
    assert ended.is_set()
    with pytest.raises(CancelledError):
        future.result(PATIENCE)
    thread.close()


def test_after_the_end() -> None:
    thread = LoopThread("t")
    thread.close()
    with pytest.raises(ReplayError, match="engine_failed"):
        thread.submit(number()).result(PATIENCE)
    with pytest.raises(ReplayError, match="engine_failed"):
        thread.run(number())


def test_its_own_thread_cannot_wait_for_it() -> None:
    thread = LoopThread("t")
    told: Future[str] = Future()

    def callback() -> None:
        try:
            thread.run(number())
        except RuntimeError as error:
            told.set_result(str(error))

    thread.loop.call_soon_threadsafe(callback)
    assert "cannot wait for itself" in told.result(PATIENCE)
    thread.close()


def test_a_loop_that_does_not_come_back_is_left() -> None:
    thread = LoopThread("t")
    let_go = threading.Event()
    thread.loop.call_soon_threadsafe(let_go.wait)
    ends(lambda: thread.close(patience=0.1))
    let_go.set()
    thread._thread.join()
