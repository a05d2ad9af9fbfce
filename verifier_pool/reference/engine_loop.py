"""An asyncio loop in a thread of its own: what a reference's `submit` runs on, whichever thread calls it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from policies.errors import ReplayError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines from any thread until `close`. Futures' callbacks run on it too, so they must be short."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._closed = False
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine. Cancelling the future cancels it; after `close` the future holds ReplayError."""
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        coroutine.close()
        future: Future[T] = Future()
        future.set_exception(ReplayError("engine_failed", "the reference is closed"))
        return future

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine.

        Raises:
            RuntimeError: on the loop's own thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("a reference's loop cannot wait for itself: leave this to another thread")
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, patience: float | None = None) -> None:
        """Cancel what still runs and end the thread. Safe to call twice.

        Args:
            patience: seconds after which a loop that does not come back is left to the process's end.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.wait(left, timeout=5))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
