"""Answers of endpoints without evidence: relayed as they are, with nothing in them that could pose as a verdict.

Of a stream it is only known how it ends: one that breaks off gets an error event in the words of its endpoint.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from policies.evidence import Evidence
from policies.settings import BoundsSettings
from proxy.tap.allowed import passed_stream
from proxy.tap.base import LARGE, error_body
from proxy.tap.bill import Bill
from proxy.tap.forged import as_utf8, names_verdict, take_out, without_verdict
from proxy.tap.guarded import Guarded
from proxy.tap.outline import is_deeper
from proxy.tap.passed import RESPONSES, Passed, error_event
from proxy.tap.rawjson import NULL, UNREADABLE, Object, is_null, raw, read_object, write
from proxy.tap.sse import Event, Splitter, hides_verdict, poses_as_verdict, replace_data
from proxy.tap.words import MESSAGES, is_messages, said_in_a_stream

_LAST = {
    MESSAGES: frozenset({"message_stop", "error"}),
    RESPONSES: frozenset({"response.completed", "response.failed", "response.incomplete", "error"}),
}
"""Types of the events that end a stream, by path; what ends one of another path is not known."""

_NESTED = ("response", "message")
_NO_TYPE = ""
_DELTA = ("_delta", ".delta")


class _Typed(msgspec.Struct):
    type: str = _NO_TYPE
    error: Raw = NULL


_typed = msgspec.json.Decoder(_Typed)


class ForeignTap(Guarded):
    """What the taps of these endpoints share; by itself it passes bytes."""

    streamed = True

    def __init__(self, passed: Passed) -> None:
        self._passed = passed
        renamed = passed.served_model != passed.model
        self._served = bytes(raw(passed.served_model)) if renamed else None
        self._public = raw(passed.model)

    @property
    def held(self) -> int:
        """See Tap."""
        return 0

    @property
    def large(self) -> bool:
        """See Tap."""
        return self.held > LARGE

    def _feed(self, data: bytes) -> bytes:
        """See Tap."""
        self.begun = True
        return data

    def _close(self, fault: str | None) -> bytes:
        """See Tap."""
        self.cut = fault is not None
        return b""

    def used(self) -> tuple[int | None, int | None]:
        """See Tap: nobody said."""
        return None, None

    def evidence(self, **meta: Any) -> list[Evidence]:
        """There is none."""
        return []

    def _rewrite(self, text: bytes) -> bytes | None:
        """The JSON object under its public name and without a verdict; None where nothing changes."""
        suspicious = names_verdict(text)
        renamed = self._served is not None and self._served in text
        if not suspicious and not renamed:
            return None
        top = read_object(text)
        if top is None:
            rest = without_verdict(text)
            return None if rest is text else rest
        changed = suspicious and take_out(top)
        if renamed:
            changed |= self._rename(top)
            for name in _NESTED:
                inner = read_object(top[name]) if name in top else None
                if inner is not None and self._rename(inner):
                    top[name] = raw(inner)
                    changed = True
        return write(top) if changed else None

    def _rename(self, fields: Object) -> bool:
        if self._served is None or "model" not in fields or bytes(fields["model"]) != self._served:
            return False
        fields["model"] = self._public
        return True


class ForeignJsonTap(ForeignTap):
    """A JSON body, held until it is whole."""

    streamed = False

    def __init__(self, passed: Passed, bounds: BoundsSettings) -> None:
        super().__init__(passed)
        self._body = bytearray()
        self._bounds = bounds
        self._whole = b""

    @property
    def held(self) -> int:
        """See Tap."""
        return len(self._body)

    def _feed(self, data: bytes) -> bytes:
        """See Tap."""
        if not self.failed:
            self.begun = True
            self._body += data
            if len(self._body) > self._bounds.answer_bytes:
                self.failed = True
                self._body.clear()
        return b""

    def _close(self, fault: str | None) -> bytes:
        """See Tap."""
        body, self._body = bytes(self._body), bytearray()
        if fault is not None or self.failed:
            return self._instead(fault or self.fault or "too_large")
        if is_deeper(body, self._bounds.json_depth):
            self.failed = True
            self.fault = "too_deep"
            return self._instead("too_deep")
        self._whole = body
        changed = self._rewrite(as_utf8(body))
        return without_verdict(body) if changed is None else changed

    def used(self) -> tuple[int | None, int | None]:
        """See Tap."""
        bill = Bill()
        bill.read(self._whole)
        return bill.prompt, bill.answer

    def _instead(self, fault: str) -> bytes:
        body = error_body(fault)
        return write(said_in_a_stream(msgspec.json.decode(body))) if is_messages(self._passed.path) else body


class ForeignStreamTap(ForeignTap):
    """Server-sent events."""

    def __init__(self, passed: Passed, bounds: BoundsSettings) -> None:
        super().__init__(passed)
        self._splitter = Splitter(bounds.line_bytes)
        self._depth = bounds.json_depth
        self._last = _LAST.get(passed.path, frozenset())
        self._ended = not self._last
        self._closed = self._dropped = False
        self._events = 0
        self._bill = Bill()
        self._deltas = 0
        self._fed = 0
        tokens = passed.tokens
        if tokens is None and self._last:
            tokens = bounds.answer_tokens
        self._most_fed = passed_stream(tokens, bounds)

    @property
    def held(self) -> int:
        """See Tap."""
        return self._splitter.held

    def _feed(self, data: bytes) -> bytes:
        """See Tap."""
        if self.failed or self._closed:
            return b""
        out = []
        self._fed += len(data)
        try:
            for event in self._splitter.push(data):
                if event.data is not None and is_deeper(event.data, self._depth):
                    self.failed = True
                    out.append(self._instead("too_deep"))
                    return b"".join(out)
                out.append(self._event(event))
        except Exception:
            out.append(self._give_up())
            return b"".join(out)
        if self._splitter.overflow:
            self.failed = True
            out.append(self._instead("line_too_long"))
        elif self._fed > self._most_fed:
            self.failed = True
            out.append(self._instead("too_large"))
        return b"".join(out)

    def _close(self, fault: str | None) -> bytes:
        """See Tap. What came of an event that broke off is not shown."""
        if self._closed:
            return b""
        self._closed = True
        rest = self._splitter.rest()
        if self.failed:
            return b""
        out = b"" if rest is None or fault is not None else self._event(rest)
        done = bool(self._last) and self._ended
        if done or (fault is None and self._ended):
            return out
        return out + (b"\n\n" if out else b"") + self._instead(fault or "upstream_closed")

    def _event(self, event: Event) -> bytes:
        if event.glue and self._dropped:
            return b""
        lines = [line for line in event.lines if not poses_as_verdict(line)]
        self._dropped = not lines
        if event.data is None:
            return b"".join(lines)
        data = event.data
        try:
            typed = _typed.decode(data)
        except UNREADABLE:
            if hides_verdict(data):
                self._dropped = True
                return b""
            typed = _Typed()
        changed = self._rewrite(data)
        wrong = typed.type == "error" or (not is_null(typed.error) and typed.type == _NO_TYPE)
        self.erred |= wrong
        if b'"usage"' in data:
            self._bill.read(data)
        self._deltas += typed.type.endswith(_DELTA)
        if wrong and not self.begun:
            self.refusal = changed if changed is not None else data
        else:
            self.begun = True
        self._events += 1
        self._ended |= wrong or typed.type in self._last
        if changed is None:
            return b"".join(lines)
        self._dropped = not changed
        return replace_data(lines, changed.replace(b"\n", b" ").replace(b"\r", b" ")) if changed else b""

    def used(self) -> tuple[int | None, int | None]:
        """See Tap. Until it is billed, an event that adds to the answer counts as a token."""
        return self._bill.prompt, max(self._bill.answer or 0, self._deltas if not self._ended else 0)

    def _instead(self, fault: str) -> bytes:
        self.fault = fault
        body = msgspec.json.decode(error_body(fault))
        return error_event(self._passed.path, body, self._events)
