"""What comes at once is worked on in slices, so that the event loop sees to others in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

SLICE = 8 * 1024
"""Bytes of a stream; the smallest events that it can be made of take two microseconds a byte."""
_TURN = 0.005


def slices(data: bytes) -> Iterator[bytes]:
    """Parts of 8 KiB at most, cut after a whole event where one ends in time."""
    at = 0
    while len(data) - at > SLICE:
        end = data.rfind(b"\n\n", at, at + SLICE)
        end = at + SLICE if end < 0 else end + 2
        yield data[at:end]
        at = end
    yield data[at:] if at else data


class Stint:
    """The time of one answer on the loop; a context manager around its work on what was read. Reading waits for nobody
    where bytes are there already, so somebody has to."""

    __slots__ = ("_began", "_worked")

    def __init__(self) -> None:
        self._began = self._worked = 0.0

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._worked += time.monotonic() - self._began

    @property
    def over(self) -> bool:
        """Whether others should have theirs."""
        return self._worked + time.monotonic() - self._began > _TURN

    async def give(self) -> None:
        """Let everybody else who can go on do so."""
        await asyncio.sleep(0)
        self._worked, self._began = 0.0, time.monotonic()
