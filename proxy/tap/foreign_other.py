"""Answers of endpoints without evidence that say of themselves neither that they are JSON nor events."""

from __future__ import annotations

from policies.settings import BoundsSettings
from proxy.tap.foreign import ForeignStreamTap
from proxy.tap.forged import START, Guard, Kind, kind_of, without_verdict
from proxy.tap.passed import Passed


class ForeignOtherTap(ForeignStreamTap):
    """What calls itself neither a stream of events nor JSON.

    Clients read it as either all the same, so that is told by how it begins. What begins like JSON is held until it is
    whole; any other bytes pass as they come, and break off where a verdict would begin.
    """

    def __init__(self, passed: Passed, bounds: BoundsSettings) -> None:
        super().__init__(passed, bounds)
        self._most = bounds.answer_bytes
        self._start = bytearray()
        self._kind: Kind | None = None
        self._guard = Guard()

    @property
    def held(self) -> int:
        """See Tap."""
        return len(self._start) + super().held

    def _feed(self, data: bytes) -> bytes:
        """See Tap."""
        self.begun = True
        if self._kind in (Kind.EVENTS, Kind.BYTES):
            return self._pass(data)
        self._start += data
        self._kind = self._kind or kind_of(bytes(self._start[:START]))
        if self._kind in (Kind.EVENTS, Kind.BYTES):
            start, self._start = bytes(self._start), bytearray()
            return self._pass(start)
        if len(self._start) > self._most:
            self.failed = self.cut = True
            self._start = bytearray()
        return b""

    def _close(self, fault: str | None) -> bytes:
        """See Tap."""
        if self._kind is Kind.EVENTS:
            return super()._close(fault)
        self.cut |= fault is not None
        if self._kind is Kind.BYTES:
            return self._guard.rest()
        start, self._start = bytes(self._start), bytearray()
        return without_verdict(start)

    def _instead(self, fault: str) -> bytes:
        if self._kind is Kind.EVENTS:
            return super()._instead(fault)
        self.cut = True
        return b""

    def _pass(self, data: bytes) -> bytes:
        if self._kind is Kind.EVENTS:
            return super()._feed(data)
        out = self._guard.push(data)
        self._fed += len(data)
        if self._guard.stopped or self._fed > self._most_fed:
            self.failed = self.cut = True
        return out
