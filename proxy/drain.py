"""The end of a process: what it still has to finish, and what is broken off because its time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Scope

BREAK_OFF = "countersign.break_off"
"""ASGI extension: `now` is called to end a connection in the middle of its answer. What was sent still goes out."""


class Drain:
    """Whether the process is on its way out, and what it still has to finish.

    Attributes:
        draining: a signal came: what runs is finished, and nothing new is begun.
        over: so is the time for it: what still runs is broken off, by us and not by its client.
        in_flight: relayed requests under way.
    """

    __slots__ = ("_tasks", "draining", "in_flight", "over")

    def __init__(self) -> None:
        self.draining = self.over = False
        self.in_flight = 0
        self._tasks: set[asyncio.Task[object]] = set()

    @contextmanager
    def flight(self) -> Iterator[None]:
        """A relayed request, in the task that serves it."""
        task = asyncio.current_task()
        assert task is not None
        self.in_flight += 1
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)
            self.in_flight -= 1

    def end(self) -> int:
        """Time is up: cancel what is under way, and say how many that are. Once may not be enough (`proxy.tasks.end`),
        so call it until none are left."""
        self.over = True
        for task in self._tasks:
            task.cancel()
        return len(self._tasks)

    def caught(self) -> bool:
        """Whether the CancelledError that the current task has caught is its `end`; then it is cancelled no more."""
        task = asyncio.current_task()
        if task is None or not self.over:
            return False
        while task.uncancel():
            pass
        return True


def break_off(scope: Scope) -> None:
    """End a connection whose answer has not been sent whole, so that its client sees that it has not. Where it is over
    already, nothing happens."""
    found = (scope.get("extensions") or {}).get(BREAK_OFF)
    if found is not None:
        found["now"]()
