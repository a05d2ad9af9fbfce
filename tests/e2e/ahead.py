"""The slow part of a module's tests, done for several of them at once: a real server answers in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

AT_ONCE = 6
"""The server of these tests holds eight sequences."""


@contextmanager
def ahead(request: pytest.FixtureRequest, test: str, work: Callable[..., Any]) -> Iterator[dict[str, Future[Any]]]:
    """Calls `work` with the parameters of every collected case of a test of the requesting module, in their order.

    Yields what comes of it, by the id of the case. A case waits for its own and for nobody else's.
    """
    cases = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and item.originalname == test
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            yield {case.nodeid: pool.submit(work, **case.callspec.params) for case in cases}
        finally:
            pool.shutdown(cancel_futures=True)
