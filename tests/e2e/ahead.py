"""The slow part of a module's tests, done for several of them at once: a real server answers in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, TypeVar

import pytest

from tests.support.standstill import AHEAD, Again, Watch

AT_ONCE = 6
"""The server of these tests holds eight sequences."""
Found = TypeVar("Found")


class Ahead(Generic[Found]):
    """What is done for the cases of a test before their turns."""

    def __init__(
        self, cases: list[pytest.Function], work: Callable[..., Found], pool: ThreadPoolExecutor, watch: Watch
    ) -> None:
        self._work, self._watch = work, watch
        self._begun: dict[str, Future[Found]] = {case.nodeid: pool.submit(self._do, case) for case in cases}

    def of(self, case: pytest.Function) -> Found:
        """What came of a case. One that is asked again, because the machine stood still, is done again."""
        begun = self._begun.pop(case.nodeid, None)
        return begun.result() if begun is not None else self._work(**case.callspec.params)

    def _do(self, case: pytest.Function) -> Found:
        with self._watch.looking() as lost:
            case.stash[AHEAD] = lost
            return self._work(**case.callspec.params)


@contextmanager
def ahead(request: pytest.FixtureRequest, test: str, work: Callable[..., Found]) -> Iterator[Ahead[Found]]:
    """Calls `work` with the parameters of every collected case of a test of the requesting module, in their order and
    from the one on whose turn it is.

    A case waits for its own and for nobody else's.
    """
    items, again = request.session.items, request.config.pluginmanager.get_plugin("countersign-again")
    assert isinstance(again, Again)
    cases = [
        item
        for item in items[items.index(request._pyfuncitem) :]
        if isinstance(item, pytest.Function) and item.path == request.path and item.originalname == test
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            yield Ahead(cases, work, pool, again.watch)
        finally:
            pool.shutdown(cancel_futures=True)
