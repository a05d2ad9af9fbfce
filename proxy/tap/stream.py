"""The tap of a stream: server-sent events in, the client's events out."""

from __future__ import annotations

from policies.message import ODD
from proxy.tap.alike import Alike, Said
from proxy.tap.allowed import Allowed
from proxy.tap.base import AFTER_END, INVALID_JSON, BaseTap, error_frame
from proxy.tap.forged import names_verdict
from proxy.tap.outline import is_deeper
from proxy.tap.rawjson import Object, is_null, raw, read_object, read_objects, write
from proxy.tap.repeats import is_ambiguous
from proxy.tap.sse import Event, Splitter, hides_verdict, poses_as_verdict, replace_data
from proxy.tap.tokens import TokenStrings
from proxy.tap.types import Prepared

_MOST_KEPT = 64 * 1024
_MOST_WAITING = 4 * 1024 * 1024
_BLANK = b"\n\n"
_DONE = b"[DONE]"
_LESSONS = 4
_LARGE_EVENT = 16 * 1024
"""Bytes of an event from which it is not read on the event loop: one made of nothing but rows of a claim takes a
microsecond a byte."""


class StreamTap(BaseTap):
    """Forwards every event at once, except where plain vLLM could only have written it later.

    A terminal chunk carries `system_fingerprint` in plain vLLM, unless a usage chunk follows; then that one
    does. Where the usage chunk is our doing, the terminal chunk of each choice waits for it, takes the
    fingerprint over, and the usage chunk goes. Chunks of other choices do not wait.

    A server started with `--enable-force-include-usage` shows itself by usage in chunks with choices; its
    usage chunk is not our doing and stays.
    """

    streamed = True

    def __init__(self, prepared: Prepared, model_name: str, strings: TokenStrings | None, allowed: Allowed) -> None:
        super().__init__(prepared, model_name, strings, allowed)
        self._splitter = Splitter(allowed.line)
        self._shows_usage = prepared.asked.usage
        self._held: list[tuple[Event, Object]] = []
        self._kept = self._asides = self._waiting = 0
        self._dropped = False
        self._closed = False
        self._fed = 0
        self._alike: Alike | None = None
        self._lesson: tuple[bytes, bytes] | None = None
        asked = prepared.asked
        plain = asked.logprobs is None and not asked.token_ids and (asked.reasoning or prepared.endpoint != "chat")
        self._lessons = _LESSONS if plain and prepared.ids_as_tokens else 0

    def _feed(self, data: bytes) -> bytes:
        """Bytes from the backend in, bytes for the client out."""
        if self.failed or self._closed:
            return b""
        found, at = self._found_alike(data)
        shown = self._taken(found, at)
        return shown + self._read(data[at:]) if at < len(data) else shown

    def _pass_on(self, data: bytes) -> bytes | None:
        """See Tap."""
        found, at = self._found_alike(data)
        return self._taken(found, at) if at == len(data) else None

    def _found_alike(self, data: bytes) -> tuple[list[tuple[bytes, Said]], int]:
        """Events that are like one before them, from the first on, and where the rest begins."""
        found: list[tuple[bytes, Said]] = []
        alike, at = self._alike, 0
        if alike is None or self.done or self.failed or self._closed or not self._splitter.idle:
            return found, at
        if not data.endswith(_BLANK) or b"\r" in data or self._fed + len(data) > self.allowed.stream:
            return found, at
        while at < len(data):
            # One character is found much faster than two.
            end = data.find(b"\n", at)
            event = data[at:end]
            said = alike.read(event) if data.startswith(_BLANK, end) else None
            if said is None:
                break
            found.append((event, said))
            at = end + len(_BLANK)
        return found, at

    def _taken(self, found: list[tuple[bytes, Said]], size: int) -> bytes:
        """They are part of the answer; returns the client's events."""
        if not found:
            return b""
        assert self._alike is not None
        self._fed += size
        for event, said in found:
            self.collector.alike(self._alike.index, event, said.chunk)
        return found[0][1].shown if len(found) == 1 else b"".join([said.shown for _, said in found])

    def _read(self, data: bytes) -> bytes:
        """Any events."""
        out = []
        over = bool(self.done)
        self._fed += len(data)
        try:
            for event in self._splitter.push(data):
                out.append(self._event(event))
                if self.failed:
                    return b"".join(out)
        except Exception:
            out.append(self._give_up())
            return b"".join(out)
        if over:
            if self._splitter.overflow:
                self.collector.fault(AFTER_END)
            return b""
        if self._splitter.overflow:
            out.append(self._fail("line_too_long"))
        elif self._fed > self.allowed.stream:
            out.append(self._fail("too_large"))
        return b"".join(out)

    def _close(self, fault: str | None) -> bytes:
        """The backend ended. An unfinished answer ends in an error frame, an unfinished event is lost."""
        if self._closed:
            return b""
        self._closed = True
        self.collector.catch_up()
        out = b""
        rest = self._splitter.rest()
        if rest is not None and fault is None and not self.failed:
            out = _ended(self._event(rest))
            self.done = _ended(self.done)
        out += self._release(None)
        if fault is not None:
            self.collector.fault(fault)
        if self.done or self.failed or self.erred:
            return out
        if fault is None and self.collector.finished():
            self.collector.terminal = True
            return out
        self.fault = fault or "upstream_closed"
        self.collector.fault(self.fault)
        return out + error_frame(self.fault)

    @property
    def held(self) -> int:
        """See Tap."""
        return self.collector.held + self._splitter.held + self._kept

    @property
    def large(self) -> bool:
        """See Tap."""
        return self._splitter.held > _LARGE_EVENT

    def _event(self, event: Event) -> bytes:
        if event.glue:
            return self._glue(event.lines[0])
        if self.done:
            return self._after_end(event)
        self._dropped = False
        lines = event.lines
        if any(map(poses_as_verdict, lines)):
            lines = [line for line in lines if not poses_as_verdict(line)]
            event = Event(lines, event.data)
            self._dropped = not lines or (event.data is None and not b"".join(lines).strip(b"\r\n"))
            if self._dropped:
                return b""
        if event.data is None:
            return self._aside(event)
        if event.data.strip() == _DONE:
            out = self._release(None)
            self.done = b"".join(lines)
            self.collector.terminal = True
            return out
        return self._frame(event)

    def _after_end(self, event: Event) -> bytes:
        """Nobody gets what comes after the terminal frame, and it is no part of the answer. That it came is remembered,
        unless it says nothing, as a second terminal frame does not."""
        self._dropped = True
        if event.data is not None and event.data.strip() not in (b"", _DONE):
            self.collector.fault(AFTER_END)
        return b""

    def _aside(self, event: Event) -> bytes:
        """A comment, which does not overtake a terminal chunk that waits. What would have to be kept is bounded."""
        text = b"".join(event.lines)
        if not self._held or self._asides + len(text) > _MOST_KEPT:
            return text
        self._asides += len(text)
        self._held.append((event, {}))
        self._dropped = True
        return b""

    def _glue(self, line: bytes) -> bytes:
        """The LF of a CRLF that a read cut in two goes where its event went."""
        if self.done:
            self.done += line if self.done.endswith(b"\r") else b""
            return b""
        if self._held and self._held[-1][0].lines[-1].endswith(b"\r") and self._dropped:
            self._held[-1][0].lines[-1] += line
            return b""
        return b"" if self._dropped else line

    def _frame(self, event: Event) -> bytes:
        data = event.data or b""
        if is_deeper(data, self.allowed.depth):
            return self._fail("too_deep")
        top = read_object(data)
        if top is None:
            if data.strip():
                self.begun = True
                self.collector.fault(INVALID_JSON)
            self._dropped = names_verdict(data) or hides_verdict(data)
            return b"" if self._dropped else b"".join(event.lines)
        if not is_null(top.get("error")):
            return self._error(event, top)
        self.begun = True
        if self.collector.too_many(top):
            return self._fail("too_large")
        choices = read_objects(top["choices"]) if "choices" in top else None
        if choices is None:
            self.collector.fault(INVALID_JSON)
            return self._rewritten(event, top) if self.view.response(top) else b"".join(event.lines)
        self.collector.response_later(top, len(data))
        usage = not is_null(top.get("usage"))
        if not choices and usage:
            return self._usage_chunk(event, top)
        self._shows_usage |= usage
        return self._chunk(event, top, choices)

    def _error(self, event: Event, top: Object) -> bytes:
        self.erred = True
        self.collector.fault("upstream_error")
        if not is_null(top.get("choices")):
            self.collector.fault(ODD)
        released = self._release(None)
        changed = self.view.response(top) or is_ambiguous(event.data or b"", top)
        if not self.begun:
            self.refusal = write(top)
        return released + (self._rewritten(event, top) if changed else b"".join(event.lines))

    def _chunk(self, event: Event, top: Object, choices: list[Object]) -> bytes:
        changed, ended = False, False
        kept: list[Object] = []
        size = len(event.data or b"")
        if len(choices) > 1:
            self.collector.apart(choices)
        for choice in choices:
            self.collector.later(choice, size)
            verdict = self.view.delta(choice)
            if verdict is None:
                changed = True
                continue
            changed |= verdict
            ended |= not is_null(choice.get("finish_reason"))
            kept.append(choice)
        if choices and not kept:
            self._dropped = True
            return b""
        if changed or is_ambiguous(top["choices"], kept):
            top["choices"], changed = raw(kept), True
        changed |= self.view.response(top)
        changed = changed or is_ambiguous(event.data or b"", top)
        may_wait = ended and not self._shows_usage and self._waiting < self.collector.expected
        if may_wait and is_null(top.get("system_fingerprint")) and self._room(size):
            self._held.append((event, top if changed else {}))
            self._waiting += 1
            self._dropped = True
            return b""
        if not changed:
            return b"".join(event.lines)
        shown = self._rewritten(event, top)
        if self._lessons and not ended and event.lines[0].startswith(b"data: ") and event.lines[1:] == [b"\n"]:
            self._lesson = event.data or b"", shown
        return shown

    def _settle(self) -> None:
        """See Tap. From a chunk it is learned what others are like it; where nothing comes of that a few times, nothing
        will."""
        if self._lesson is not None:
            data, shown = self._lesson
            self._lesson = None
            self._lessons -= 1
            learnt = Alike.learn(self.prepared.endpoint, data, shown, self.allowed)
            if learnt is not None and learnt.index < self.collector.expected:
                self._alike = learnt
        super()._settle()

    def _room(self, size: int) -> bool:
        """Whether there is room for a chunk that waits."""
        if self._kept + size > _MOST_WAITING:
            return False
        self._kept += size
        return True

    def _usage_chunk(self, event: Event, top: Object) -> bytes:
        out = self._release(top)
        if not self._shows_usage:
            self._dropped = True
            return out
        changed = self.view.response(top) or is_ambiguous(event.data or b"", top)
        return out + (self._rewritten(event, top) if changed else b"".join(event.lines))

    def _release(self, usage_chunk: Object | None) -> bytes:
        """The terminal chunks that waited, with the usage chunk's fingerprint."""
        if not self._held:
            return b""
        fingerprint = None if usage_chunk is None else usage_chunk.get("system_fingerprint")
        out = []
        for event, changed in self._held:
            if event.data is None:
                out.append(b"".join(event.lines))
                continue
            top = changed or (read_object(event.data or b"") or {})
            if fingerprint is not None and not is_null(fingerprint):
                top["system_fingerprint"] = fingerprint
                changed = top
            out.append(self._rewritten(event, top) if changed else b"".join(event.lines))
        self._held = []
        self._kept = self._asides = self._waiting = 0
        return b"".join(out)

    def _rewritten(self, event: Event, top: Object) -> bytes:
        # Untouched values keep their bytes, but a line end between two tokens would end the data line.
        return replace_data(event.lines, write(top).replace(b"\n", b" ").replace(b"\r", b" "))

    def _instead(self, fault: str) -> bytes:
        self._held = []
        return error_frame(fault)

    def _fail(self, fault: str) -> bytes:
        self.failed = True
        self.fault = fault
        self.collector.fault(fault)
        return self._release(None) + error_frame(fault)


def _ended(data: bytes) -> bytes:
    """Bytes of whole events: the last one gets the blank line it lacks."""
    if not data or data.endswith((b"\n\n", b"\r\r", b"\n\r\n", b"\r\n\r\n")):
        return data
    return data + (b"\n" if data.endswith(b"\n") else b"\n\n")
