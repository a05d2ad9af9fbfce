"""Server-sent events: bytes in, whole events out, each with the bytes it came as.

Lines end in LF, CRLF or CR and nothing else (U+2028 and friends are text). Reads may cut anywhere, even
between CR and LF. The cost is linear in the bytes, however small the reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from proxy.tap.forged import BREAK, names_verdict

BOM = b"\xef\xbb\xbf"
_BLANK = [b"\n"]
_FIELDS = (b"data:", b"id:", b"retry:")
_OURS = re.compile(rb"(?:event)?:[^a-z{]*countersign", re.IGNORECASE)
"""Whatever is no letter may be white space to somebody."""
_BREAK = re.compile(BREAK)
_SHORTEST = len("countersign")
_MOST_LINES = 65_536


class Event(NamedTuple):
    """One event, or a comment that stands alone, or blank lines.

    Attributes:
        lines: the raw lines, terminators included; together they are the event as it came.
        data: payload of its data lines, joined by newlines; None when it has none.
        glue: these bytes are the LF of a CRLF whose CR ended the previous event.
    """

    lines: list[bytes]
    data: bytes | None
    glue: bool = False


class Splitter:
    """Cuts a stream of bytes into events.

    `overflow` turns true when a line, or an event, grows over `limit` bytes, or an event over 65,536 lines; nothing
    comes out after that.
    """

    def __init__(self, limit: int) -> None:
        self.overflow = False
        self._limit = limit
        self._buffer = bytearray()
        self._scanned = 0
        self._lines: list[bytes] = []
        self._data: list[bytes] = []
        self._size = 0
        self._at_start = True
        self._cr_at_end = False

    def push(self, data: bytes) -> Iterator[Event]:
        """The events completed by `data`."""
        held = self._buffer or self._lines or self._cr_at_end or self.overflow
        if held or not data.startswith(b"data: ") or not data.endswith(b"\n\n") or b"\r" in data:
            yield from self._push(data)
            return
        # What engines send: whole events, of one data line each.
        self._at_start = False
        for event in data[:-2].split(b"\n\n"):
            if event.startswith(b"data: ") and b"\n" not in event and len(event) + 2 <= self._limit:
                yield Event([event + b"\n", b"\n"], event[6:])
            else:
                yield from self._push(event + b"\n\n")
                if self.overflow:
                    return

    def _push(self, data: bytes) -> Iterator[Event]:
        """The same for any bytes."""
        if self.overflow or not data:
            return
        if self._cr_at_end:
            self._cr_at_end = False
            if data[:1] == b"\n":
                data = data[1:]
                if self._lines:
                    self._lines[-1] += b"\n"
                else:
                    yield Event([b"\n"], None, glue=True)
        buffer = self._buffer
        buffer += data
        start, search = 0, self._scanned
        newline = buffer.find(b"\n", search)
        while True:
            stop = newline if newline >= 0 else len(buffer)
            carriage = buffer.find(b"\r", search, stop)
            if carriage >= 0:
                end = carriage + 1
                if end == newline:
                    end += 1
                elif end == len(buffer):
                    self._cr_at_end = True
            elif newline >= 0:
                end = newline + 1
            else:
                break
            if self._size + end - start > self._limit:
                break
            yield from self._line(bytes(buffer[start:end]))
            start = search = end
            if 0 <= newline < end:
                newline = buffer.find(b"\n", end)
        del buffer[:start]
        self._scanned = len(buffer)
        if self._size + len(buffer) > self._limit or len(self._lines) > _MOST_LINES:
            self.overflow = True
            self._drop()

    @property
    def idle(self) -> bool:
        """Whether what comes next begins an event."""
        return not (self._buffer or self._lines or self._cr_at_end or self._at_start or self.overflow)

    @property
    def held(self) -> int:
        """Bytes of an event that is not whole yet."""
        return self._size + len(self._buffer)

    def rest(self) -> Event | None:
        """The event a stream ended in without its blank line, if any; nothing comes out after that."""
        if self._buffer:
            list(self._line(bytes(self._buffer)))
        event = self._flush() if self._lines else None
        self._drop()
        return event

    def _line(self, line: bytes) -> Iterator[Event]:
        text = line.rstrip(b"\r\n")
        if self._at_start:
            self._at_start = False
            text = text.removeprefix(BOM)
        if not text:
            self._lines.append(line)
            yield self._flush()
            return
        if text[:1] == b":" and not self._lines:
            yield Event([line], None)
            return
        self._lines.append(line)
        self._size += len(line)
        payload = data_of(text)
        if payload is not None:
            self._data.append(payload)

    def _flush(self) -> Event:
        payload = (self._data[0] if len(self._data) == 1 else b"\n".join(self._data)) if self._data else None
        event = Event(self._lines, payload)
        self._lines, self._data, self._size = [], [], 0
        return event

    def _drop(self) -> None:
        self._buffer.clear()
        self._scanned = 0
        self._lines, self._data, self._size = [], [], 0


def data_of(text: bytes) -> bytes | None:
    """Payload of a data line (without its terminator), or None for any other line."""
    if text.startswith(b"data:"):
        return text[6:] if text[5:6] == b" " else text[5:]
    return b"" if text == b"data" else None


def replace_data(lines: list[bytes], payload: bytes) -> bytes:
    """The event with other data: its first data line carries `payload`, further data lines go."""
    if lines[1:] == _BLANK and lines[0].startswith(b"data: ") and b"\r" not in lines[0]:
        return b"data: %b\n\n" % payload
    out: list[bytes] = []
    written = False
    for line in lines:
        text = line.rstrip(b"\r\n")
        bom = BOM if text.startswith(BOM) else b""
        if data_of(text[len(bom) :]) is None:
            out.append(line)
        elif not written:
            written = True
            space = b" " if text[len(bom) + 5 : len(bom) + 6] == b" " else b""
            out.append(bom + b"data:" + space + payload + line[len(text) :])
    return b"".join(out)


def poses_as_verdict(line: bytes) -> bool:
    """Whether a line is a comment, or the name of an event, that a client could take for our verdict; or part of what
    is no event at all but JSON with a verdict in it, for a client that asks no content type."""
    if len(line) < _SHORTEST or line.startswith(b"data:"):
        return False
    return (not line.startswith(_FIELDS) and _poses(line)) or hides_verdict(line)


def hides_verdict(data: bytes) -> bool:
    """Whether data that is no JSON holds such a line, for a client that finds lines where Unicode does."""
    return any(map(_poses, _BREAK.split(data)[1:]))


def _poses(text: bytes) -> bool:
    text = text.removeprefix(BOM)
    if text.startswith((b":", b"event:")):
        return _OURS.match(text) is not None
    return names_verdict(text.replace(b"\0", b""), key=False)
