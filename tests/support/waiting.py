"""Waiting for what is to happen: for as long as the slowest machine may need, and no longer than it takes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = 60.0
"""Seconds within which whatever is to happen has happened, on a machine that stands still now and then as well. Only a
test that fails waits for so long."""
TRIES = 20
"""How often something may be tried that is at once, or in time, unless the machine stands still meanwhile."""
_POLL = 0.005

Found = TypeVar("Found")


def wait_until(found: Callable[[], Found], within: float = PATIENCE, what: object = "") -> Found:
    """Ask until the answer is true, and return it.

    Args:
        found: what is asked; may raise AssertionError for as long as it is false.
        within: seconds.
        what: said of it when it does not come true; a function is called for it.
    """
    deadline = time.monotonic() + within
    while True:
        # An answer that was late because of the machine counts, so the last one comes after the deadline.
        late = time.monotonic() > deadline
        try:
            if answer := found():
                return answer
            assert not late, _said(what)
        except AssertionError:
            if late:
                raise
        time.sleep(_POLL)


async def until(found: Callable[[], Found], within: float = PATIENCE, what: object = "") -> Found:
    """The same on an event loop."""
    deadline = time.monotonic() + within
    while True:
        late = time.monotonic() > deadline
        if answer := found():
            return answer
        assert not late, _said(what)
        await asyncio.sleep(_POLL)


def ends(work: Callable[[], Found]) -> Found:
    """Do what waits for something of its own, and return what it does. What it must not wait for never comes."""
    done: list[Found] = []
    thread = threading.Thread(target=lambda: done.append(work()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert done, "it does not end"
    return done[0]


def _said(what: object) -> object:
    return (what() if callable(what) else what) or "it did not come true"
