"""Endpoints whose answers carry no evidence: relayed as they are, with nothing in them that could pose as a verdict.

Of a stream it is only known how it ends: one that breaks off gets an error event in the words of its endpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw

from policies.evidence import Evidence
from policies.settings import BackendSettings, BoundsSettings
from proxy.tap.allowed import passed_stream
from proxy.tap.base import LARGE, error_body
from proxy.tap.bill import Bill
from proxy.tap.forged import START, Guard, Kind, as_utf8, kind_of, names_verdict, take_out, without_verdict
from proxy.tap.outline import is_deeper
from proxy.tap.rawjson import NULL, UNREADABLE, Object, is_null, raw, read_object, write
from proxy.tap.sse import Event, Splitter, poses_as_verdict, replace_data
from proxy.tap.types import Asked
from proxy.tap.words import MESSAGES, is_messages, said_in_a_stream

if TYPE_CHECKING:
    from proxy.relay.body import Body

RESPONSES = "/v1/responses"
_DEFAULT = BoundsSettings()
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


@dataclass(frozen=True, slots=True)
class Passed:
    """A request ready to go up as it came; only another name of the model is put in.

    Attributes:
        path: the endpoint's.
        model: the model's public name. `served_model`: the backend's.
        tokens: output tokens asked for in all; None when the request does not say.
    """

    path: str
    body: bytes
    asked: Asked
    model: str
    served_model: str
    tokens: int | None = None

    @property
    def upstream_stream(self) -> bool:
        """Whether the backend is asked to stream."""
        return self.asked.stream


def pass_on(body: Body, backend: BackendSettings) -> Passed:
    """The request as it goes up."""
    served = backend.served_model or backend.model
    data = body.data if served == backend.model else write({**body.raws, "model": raw(served)})
    tokens = None if body.most_tokens is None else body.most_tokens * body.choices
    return Passed(body.endpoint, data, Asked(stream=body.stream), backend.model, served, tokens)


def error_event(path: str, body: dict[str, Any], number: int = 0) -> bytes:
    """An OpenAI-shaped error as the last event of a stream of that path; `number` events came before it."""
    if path == MESSAGES:
        return b"event: error\ndata: " + write(said_in_a_stream(body)) + b"\n\n"
    if path == RESPONSES:
        said = {name: body["error"][name] for name in ("code", "message", "param")}
        return b"event: error\ndata: " + write({"type": "error", **said, "sequence_number": number}) + b"\n\n"
    return b"data: " + write(body) + b"\n\n"


def open_foreign_tap(passed: Passed, *, content_type: str | None, bounds: BoundsSettings = _DEFAULT) -> ForeignTap:
    """The tap for one answer."""
    kind = (content_type or "").split(";")[0].strip().lower()
    if kind == "text/event-stream":
        return ForeignStreamTap(passed, bounds)
    if kind in ("", "application/json") or kind.endswith("+json"):
        return ForeignJsonTap(passed, bounds)
    return ForeignOtherTap(passed, bounds)


class ForeignTap:
    """What the taps of these endpoints share; by itself it passes bytes."""

    done = b""
    failed = False
    begun = False
    fault: str | None = None
    erred = False
    cut = False
    refusal: bytes | None = None
    streamed = True
    content_type: str | None = None

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

    def feed(self, data: bytes) -> bytes:
        """See Tap."""
        self.begun = True
        return data

    def close(self, fault: str | None = None) -> bytes:
        """See Tap."""
        self.cut = fault is not None
        return b""

    def settle(self) -> None:
        """See Tap."""

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

    def feed(self, data: bytes) -> bytes:
        """See Tap."""
        if not self.failed:
            self.begun = True
            self._body += data
            if len(self._body) > self._bounds.answer_bytes:
                self.failed = True
                self._body.clear()
        return b""

    def close(self, fault: str | None = None) -> bytes:
        """See Tap."""
        body, self._body = bytes(self._body), bytearray()
        if fault is not None or self.failed:
            return self._said(fault or "too_large")
        if is_deeper(body, self._bounds.json_depth):
            self.failed = True
            self.fault = "too_deep"
            return self._said("too_deep")
        self._whole = body
        changed = self._rewrite(as_utf8(body))
        return without_verdict(body) if changed is None else changed

    def used(self) -> tuple[int | None, int | None]:
        """See Tap."""
        bill = Bill()
        bill.read(self._whole)
        return bill.prompt, bill.answer

    def _said(self, fault: str) -> bytes:
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

    def feed(self, data: bytes) -> bytes:
        """See Tap."""
        if self.failed or self._closed:
            return b""
        out = []
        self._fed += len(data)
        for event in self._splitter.push(data):
            if event.data is not None and is_deeper(event.data, self._depth):
                self.failed = True
                out.append(self._error("too_deep"))
                return b"".join(out)
            out.append(self._event(event))
        if self._splitter.overflow:
            self.failed = True
            out.append(self._error("line_too_long"))
        elif self._fed > self._most_fed:
            self.failed = True
            out.append(self._error("too_large"))
        return b"".join(out)

    def close(self, fault: str | None = None) -> bytes:
        """See Tap. What came of an event that broke off is not shown."""
        if self._closed:
            return b""
        self._closed = True
        if self.failed:
            return b""
        rest = self._splitter.rest() if fault is None else None
        out = b"" if rest is None else self._event(rest)
        done = bool(self._last) and self._ended
        if done or (fault is None and self._ended):
            return out
        return out + (b"\n\n" if out else b"") + self._error(fault or "upstream_closed")

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

    def _error(self, fault: str) -> bytes:
        self.fault = fault
        body = msgspec.json.decode(error_body(fault))
        return error_event(self._passed.path, body, self._events)


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

    def feed(self, data: bytes) -> bytes:
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

    def close(self, fault: str | None = None) -> bytes:
        """See Tap."""
        if self._kind is Kind.EVENTS:
            return super().close(fault)
        self.cut |= fault is not None
        if self._kind is Kind.BYTES:
            return self._guard.rest()
        start, self._start = bytes(self._start), bytearray()
        return without_verdict(start)

    def _pass(self, data: bytes) -> bytes:
        if self._kind is Kind.EVENTS:
            return super().feed(data)
        out = self._guard.push(data)
        self._fed += len(data)
        if self._guard.stopped or self._fed > self._most_fed:
            self.failed = self.cut = True
        return out
