"""All that a replay loop has in flight, and what of it landed."""

from __future__ import annotations

import queue as queues
import time
from collections.abc import Callable, Iterator, Sequence

from verifier_pool.flights import Fate, Flight
from verifier_pool.link.queue import RETRY_SECONDS
from verifier_pool.replays import Stamp

BATCH = 64
"""Jobs taken, or ended, at once: in between, the reference already computes what was taken, and gets more."""
BATCH_BYTES = 8 * 1024 * 1024
"""Outcomes stored in one transaction, roughly: Redis serves nobody else while it runs."""
SLOWEST = 3
"""How many times its time-out a replay may take while others get on."""


class Flying:
    """All flights of a loop, and what they hold together. Read by other threads, written by the loop's alone, which
    hears of those that end through `lands`.

    Attributes:
        landed: those that ended and are not over yet, in the order in which they did.
    """

    def __init__(self) -> None:
        self._flights: dict[Flight, None] = {}
        self._landings: queues.SimpleQueue[Flight] = queues.SimpleQueue()
        self.landed: dict[Flight, None] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._flights))

    def __contains__(self, flight: object) -> bool:
        return flight in self._flights

    def add(self, flight: Flight) -> None:
        """One more."""
        self._flights[flight] = None
        self.tokens += flight.tokens

    def remove(self, flights: Sequence[Flight]) -> None:
        """These are over."""
        for flight in flights:
            self.landed.pop(flight, None)
            if flight in self._flights:
                del self._flights[flight]
                self.tokens -= flight.tokens

    def lands(self, flight: Flight) -> None:
        """This one may have ended. Called from any thread."""
        self._landings.put(flight)

    def collect(self, seconds: float = 0.0) -> None:
        """See what landed; where nothing has, wait for that so long."""
        try:
            flight = self._landings.get(timeout=seconds) if seconds else self._landings.get_nowait()
            while True:
                if flight in self._flights and flight.ended:
                    self.landed[flight] = None
                flight = self._landings.get_nowait()
        except queues.Empty:
            return

    def late(self, last_success: float) -> list[tuple[Flight, bool]]:
        """What is over its time, and whether nothing succeeded for so long.

        Where others get on, what waits in the reference for its turn has more time.

        Args:
            last_success: seconds of the monotonic clock.
        """
        moment, found = time.monotonic(), []
        for flight in self:
            stuck = moment - max(flight.began, last_success) > flight.patience
            if not flight.ended and (stuck or moment - flight.began > SLOWEST * flight.patience):
                found.append((flight, stuck))
        return found

    def batch(self, stamp: Callable[[Flight], Stamp | None]) -> list[tuple[Flight, Fate]]:
        """What landed first, as much as is stored at once, and what becomes of it.

        Args:
            stamp: says who replayed a flight that landed.
        """
        batch: list[tuple[Flight, Fate]] = []
        size = 0
        for flight in self.landed:
            if len(batch) == BATCH or size > BATCH_BYTES:
                break
            fate = flight.settle(len(RETRY_SECONDS), stamp(flight))
            batch.append((flight, fate))
            size += len(flight.packed) if fate is Fate.DONE else 0
        return batch
