"""Taps of answers that are not streamed, and of whatever is not an answer."""

from __future__ import annotations

from proxy.tap.allowed import Allowed
from proxy.tap.base import INVALID_JSON, LARGE, BaseTap, error_body
from proxy.tap.forged import without_verdict
from proxy.tap.outline import is_deeper
from proxy.tap.rawjson import is_null, read_object, write
from proxy.tap.repeats import is_ambiguous
from proxy.tap.tokens import TokenStrings
from proxy.tap.types import Prepared


class WholeTap(BaseTap):
    """A JSON body: nothing goes to the client before all of it is here."""

    def __init__(self, prepared: Prepared, model_name: str, strings: TokenStrings | None, allowed: Allowed) -> None:
        super().__init__(prepared, model_name, strings, allowed)
        self._body = bytearray()
        self._closed = False

    def _feed(self, data: bytes) -> bytes:
        """Keeps the bytes; returns nothing."""
        if not self.failed and not self._closed:
            self.begun = True
            self._body += data
            if len(self._body) > self.allowed.body:
                self.failed = True
                self.fault = "too_large"
                self._body.clear()
                self.collector.fault("too_large")
        return b""

    def _close(self, fault: str | None) -> bytes:
        """The client's body. After a fault an OpenAI-shaped error, for half a JSON body helps nobody."""
        if self._closed:
            return b""
        self._closed = True
        body, self._body = bytes(self._body), bytearray()
        if self.failed:
            return self.ended(self.fault or "too_large")
        if fault is not None:
            self.collector.fault(fault)
            return self.ended(fault)
        return self.answer(body)

    @property
    def held(self) -> int:
        """See Tap."""
        return self.collector.held + len(self._body)

    @property
    def large(self) -> bool:
        """See Tap."""
        return len(self._body) > LARGE

    def ended(self, fault: str) -> bytes:
        """What the client gets when the body did not arrive whole."""
        return error_body(fault)

    def _instead(self, fault: str) -> bytes:
        return self.ended(fault)

    def over(self, fault: str) -> bytes:
        """What the client gets instead of a body that is not passed on."""
        self.failed = True
        self.fault = fault
        self.collector.fault(fault)
        return self.ended(fault)

    def answer(self, body: bytes) -> bytes:
        """The client's view of a body that arrived whole."""
        if is_deeper(body, self.allowed.depth):
            return self.over("too_deep")
        top = read_object(body)
        if top is None:
            return self.unreadable(body)
        if is_null(top.get("choices")):
            self.collector.fault(INVALID_JSON if is_null(top.get("error")) else "upstream_error")
            return self._renamed(without_verdict(body))
        if self.collector.too_many(top):
            return self.over("too_large")
        result = self.whole(top)
        if result is None:
            return self.over(INVALID_JSON)
        shown, changed = result
        return write(shown) if changed or is_ambiguous(body, shown) else body

    def unreadable(self, body: bytes) -> bytes:
        """What the client gets of a body that is no JSON object. Nothing could be hidden in it, and a client that waits
        for an object would take it for text, or break over it."""
        if body.strip():
            return self.over(INVALID_JSON)
        self.collector.fault(INVALID_JSON)
        return body

    def _renamed(self, body: bytes) -> bytes:
        """An object that is no answer, under the model's public name."""
        top = read_object(body)
        return write(top) if top is not None and self.view.response(top) else body


class PassTap(BaseTap):
    """An answer that carries no generation: one with an error status.

    It passes as it is, once it is whole, so that nothing in it can pose as a verdict, whatever it is called; whoever
    feeds it knows how long an error may be.
    """

    def __init__(self, prepared: Prepared, allowed: Allowed) -> None:
        super().__init__(prepared, "", None, allowed)
        self._body = bytearray()
        self.collector.fault("upstream_error")

    def _feed(self, data: bytes) -> bytes:
        """Keeps the bytes; returns nothing."""
        self.begun = True
        self._body += data
        return b""

    def _close(self, fault: str | None) -> bytes:
        """What was kept; nothing after a fault, for half a JSON body helps nobody."""
        body, self._body = bytes(self._body), bytearray()
        if fault is None and is_deeper(body, self.allowed.depth):
            self.failed = True
            self.fault = fault = "too_deep"
        if fault is not None:
            self.collector.fault(fault)
            return b""
        return without_verdict(body)

    @property
    def held(self) -> int:
        """See Tap."""
        return len(self._body)

    @property
    def large(self) -> bool:
        """See Tap."""
        return len(self._body) > LARGE
