"""Work that begins before somebody waits for it, without a task of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Begun(Generic[T]):
    """A coroutine, or what else can be awaited, that has run up to where it first has to wait; await it for the rest.

    It is a part of the task that began it, and so are its time-outs: there, and nowhere else, it has to be awaited, and
    nothing else may be awaited before.

    Attributes:
        done: it did not have to wait. `result` is what it returned then; what it raised is raised where it is begun.
    """

    __slots__ = ("_pending", "_steps", "done", "result")

    result: T

    def __init__(self, work: Awaitable[T]) -> None:
        self._steps = work.__await__()
        self.done = False
        self._pending: Any = None
        try:
            self._pending = next(self._steps)
        except StopIteration as end:
            self.done, self.result = True, end.value

    def __await__(self) -> Generator[Any, Any, T]:
        while not self.done:
            try:
                try:
                    sent = yield self._pending
                except BaseException as error:
                    self._pending = self._steps.throw(error)
                else:
                    self._pending = self._steps.send(sent)
            except StopIteration as end:
                self.done, self.result = True, end.value
        return self.result
