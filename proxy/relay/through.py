"""A stream that goes on as it did before, passed on where it arrives, without the task that serves it."""

from __future__ import annotations

import time

from proxy.relay.clock import Clock, Deadline
from proxy.relay.downlink import Downlink
from proxy.relay.encoding import Decoder, Identity
from proxy.relay.record import Record
from proxy.relay.slices import SLICE
from proxy.tap.types import Tap


class Through:
    """Deals with what is usual, which is nearly all of a stream. What is not is left to who waits for it: anything else
    than more of the same, all that comes at once, and a client that is behind.

    Attributes:
        most: bytes of the answer up to which it is on its own; then it has to be weighed.
    """

    __slots__ = ("_clock", "_data", "_deadline", "_down", "_record", "_tap", "most")

    def __init__(self, tap: Tap, record: Record, down: Downlink, clock: Clock, deadline: Deadline, most: int) -> None:
        self._tap = tap
        self._record = record
        self._down = down
        self._clock = clock
        self._deadline = deadline
        self._data = b""
        self.most = most

    def take(self, data: bytes) -> bool:
        """Pass it on; whether that was done."""
        arrived = time.monotonic()
        record, tap = self._record, self._tap
        if len(data) > SLICE or record.received + len(data) >= self.most or tap.erred or not self._down.ready:
            return False
        shown = tap.pass_on(data)
        if shown is None:
            return False
        shown = record.secret.mask(shown, error=False)
        record.show(shown)
        self._down.pass_on(shown)
        if tap.failed:
            # Its client was told. Who waits is woken by these bytes, which say nothing any more, and ends it.
            return False
        record.received += len(data)
        tap.settle()
        self._clock.passed(arrived, self._deadline)
        return True


def usual(tap: Tap, decoder: Decoder) -> bool:
    """Whether there can be such parts at all."""
    return tap.streamed and isinstance(decoder, Identity)
