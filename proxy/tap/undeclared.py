"""Answers to requests for a stream that do not say of themselves that they are one."""

from __future__ import annotations

from proxy.tap.allowed import Allowed
from proxy.tap.base import INVALID_JSON, LARGE
from proxy.tap.forged import START, Kind, kind_of, without_verdict
from proxy.tap.rawjson import read_object
from proxy.tap.sse import poses_as_verdict
from proxy.tap.stream import StreamTap
from proxy.tap.tokens import TokenStrings
from proxy.tap.types import Prepared
from proxy.tap.whole import WholeTap


class UndeclaredTap(StreamTap):
    """A stream under a content type that is not one of streams.

    Clients look for events all the same, so a backend must not get past us by a header. Where not one event
    came, it was some other page, which passes as it is; what begins like JSON does once it is whole, as a whole answer
    would, less what could pose as a verdict.
    """

    def __init__(self, prepared: Prepared, model_name: str, strings: TokenStrings | None, allowed: Allowed) -> None:
        super().__init__(prepared, model_name, strings, allowed)
        self._start: bytearray | None = bytearray()
        self._json = False

    @property
    def held(self) -> int:
        """See Tap."""
        return super().held + len(self._start or b"")

    @property
    def large(self) -> bool:
        """See Tap."""
        return super().large or len(self._start or b"") > LARGE

    @property
    def found(self) -> bool:
        """Whether there is a stream in what came so far."""
        return bool(self.done or self.erred or self.failed or self.collector.choices)

    def _feed(self, data: bytes) -> bytes:
        """As of a stream, unless it begins like JSON."""
        if self._start is None or self.failed or self._closed:
            return super()._feed(data)
        self._start += data
        if not self._json:
            kind = kind_of(bytes(self._start[:START]))
            if kind not in (None, Kind.JSON):
                start, self._start = bytes(self._start), None
                return super()._feed(start)
            self._json = kind is Kind.JSON
        if len(self._start) > self.allowed.body:
            self._start = None
            return self._fail("too_large")
        return b""

    def _close(self, fault: str | None) -> bytes:
        """As of a stream, if it was one."""
        if self._start is not None and not self._closed:
            start, self._start = bytes(self._start), None
            return self._close_held(start, fault)
        if self._closed or self.found:
            return super()._close(fault)
        rest = self._splitter.rest()
        page = b"" if rest is None else b"".join(line for line in rest.lines if not poses_as_verdict(line))
        return self._page(page, fault)

    def _close_held(self, start: bytes, fault: str | None) -> bytes:
        """Of what began like JSON nothing was shown yet: it may be that, or hold events all the same."""
        if fault is None and read_object(start) is not None:
            whole = WholeTap(self.prepared, "", None, self.allowed)
            whole.collector, whole.view = self.collector, self.view
            self._closed = self.failed = True
            shown = whole.answer(start)
            self.fault = whole.fault
            return shown
        shown = super()._feed(start)
        return shown + super()._close(fault) if self.found else self._page(without_verdict(start), fault)

    def _page(self, shown: bytes, fault: str | None) -> bytes:
        self._closed = self.failed = True
        self.cut = fault is not None
        self.collector.fault(fault or "upstream_error")
        return shown


class UnstreamedTap(WholeTap):
    """A JSON body where a stream was asked for. What says so and is none may hold events, as above."""

    def unreadable(self, body: bytes) -> bytes:
        """The events as one body; any other page passes as it is."""
        events = UndeclaredTap(self.prepared, "", None, self.allowed)
        events.collector, events.view = self.collector, self.view
        shown = StreamTap._feed(events, body)
        if not events.found:
            self.collector.fault(INVALID_JSON)
            return without_verdict(body)
        if events.failed:
            return self.over(events.fault or INVALID_JSON)
        return shown + StreamTap._close(events, None) + events.done
