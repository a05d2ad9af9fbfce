"""Whether a reference gets on, and how long to leave it alone where it does not."""

from __future__ import annotations

import time
from collections.abc import Sequence

from verifier_pool.flights import Flight

TROUBLE_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Waits before another job is tried on a reference that just failed; the last one repeats."""
STILL = 3
"""Failures, each after its wait and none followed by a success, after which a reference stands still."""


class Troubles:
    """True while nothing succeeded since something failed.

    Attributes:
        last_success: seconds of the monotonic clock.
    """

    def __init__(self) -> None:
        self._count = 0
        self._not_before = 0.0
        self.last_success = time.monotonic()

    def __bool__(self) -> bool:
        return self._count > 0

    @property
    def still(self) -> bool:
        """Whether that is so for a while."""
        return self._count >= STILL

    @property
    def wait(self) -> float:
        """Seconds in which nothing is to be tried."""
        return max(self._not_before - time.monotonic(), 0.0)

    def note(self, flights: Sequence[Flight]) -> None:
        """These are over."""
        if any(not flight.troubled and not flight.void for flight in flights):
            self._count, self._not_before, self.last_success = 0, 0.0, time.monotonic()
        elif any(flight.troubled for flight in flights) and not self.wait:
            self._not_before = time.monotonic() + TROUBLE_SECONDS[min(self._count, len(TROUBLE_SECONDS) - 1)]
            self._count += 1
