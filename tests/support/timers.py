"""The timers of a proxy's event loop, which a test may stop: what happens all the same does not wait for any."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import uvloop


class Timers:
    """Those of every uvloop that is made from here on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._go = threading.Event()
        self._go.set()
        self._held: list[tuple[uvloop.Loop, Callable[[], object]]] = []
        monkeypatch.setattr(uvloop.Loop, "call_later", self._gated(uvloop.Loop.call_later))

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Nothing rings meanwhile; what would have does so afterwards."""
        self._go.clear()
        try:
            yield
        finally:
            self._go.set()
            for loop, ring in self._held:
                loop.call_soon_threadsafe(ring)

    def _gated(self, call_later: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call_later)
        def gated(loop: uvloop.Loop, delay: float, callback: Callable[..., object], *args: Any, **more: Any) -> Any:
            def ring() -> None:
                if not handle.cancelled():
                    callback(*args)

            def rings() -> None:
                if self._go.is_set():
                    callback(*args)
                else:
                    self._held.append((loop, ring))

            handle = call_later(loop, delay, rings, **more)
            return handle

        return gated
