"""What of a backend's could be taken for our verdict: a `countersign` field where ours stands, or could stand.

It is looked for in the bytes, whatever they are called: clients read JSON without a look at its content type, spelled
with escapes, and in UTF-16 or UTF-32 as well as in UTF-8; some do not tell large letters from small ones, nor the long
s from the other; and some find lines where Unicode does.
"""

from __future__ import annotations

import json
import re
from enum import Enum

from proxy.tap.rawjson import Object, raw, read_object, read_objects, read_value, write

_NAME = "countersign"
_WITHIN = ("error", "response", "message", "delta")
_SPACE = b" \t\r\n"
_MARKS = b"\xef\xbb\xbf\xfe\xff\x00" + _SPACE
_EVENTS = (b":", b"data:", b"event:", b"id:", b"retry:")
_LONGEST_FIELD = 6
START = 4096
_MOST_READ = 4 * 1024 * 1024
"""Bytes of what is not JSON that are looked through line by line, which takes a second for 20 MB."""


def _spelled(letter: str) -> bytes:
    code, upper = ord(letter), ord(letter.upper())
    also = rb"|\xc5\xbf|\\u017(?i:f)" if letter == "s" else b""
    return rb"(?:(?i:%c)|\\u00(?i:%02x|%02x)%b)" % (code, code, upper, also)


def _begun() -> bytes:
    """Whatever is a beginning of the quoted name, up to its last character."""
    rest = rb'(?:"[ \t\r\n]*)?'
    for letter in reversed(_NAME):
        rest = rb"(?:" + _spelled(letter) + rest + rb"|\xc5|\\(?:u(?:0(?:0[4-7]?|17?)?)?)?)?"
    return rest


BREAK = rb"[\x0b\x0c\x1c-\x1e]|\xc2\x85|\xe2\x80[\xa8\xa9]"
"""What ends a line for some readers, and for none of events or of JSON."""
_START = rb"(?:\A|(?<=[\r\n\x0b\x0c\x1c-\x1e])|(?<=\xc2\x85)|(?<=\xe2\x80[\xa8\xa9]))(?:\xef\xbb\xbf)?"
_QUOTED = re.compile(b'"' + b"".join(map(_spelled, _NAME)) + b'"')
_KEY = re.compile(_QUOTED.pattern + rb"[ \t\r\n]*:")
_COMMENT = re.compile(_START + rb":[^A-Za-z{\r\n]*(?i:countersign)[^\r\n]*")
_BEGUN = re.compile(b'"' + _begun() + rb"\Z")
_LONGEST = 2 + 6 * len(_NAME)


def _word_begun() -> bytes:
    """Whatever is a beginning of the name, in any letters."""
    rest = b""
    for letter in reversed(_NAME.encode()):
        rest = rb"(?:(?i:%c)%b)?" % (letter, rest)
    return rest


_PART = 1024 * 1024
_SPACES = 64
"""Characters between a comment's colon and its word, in bytes that may be anything."""
_LINE = rb"(?:[\r\n]|" + BREAK + rb")"
_NEAR = re.compile(_LINE + rb"(?:\xef\xbb\xbf)?:[^A-Za-z{\r\n]{0,%d}(?i:countersign)" % _SPACES)
_NEAR_BEGUN = re.compile(
    rb"(?:%b(?:\xef(?:\xbb\xbf?)?)?(?::[^A-Za-z{\r\n]{0,%d}%b)?|\xc2|\xe2\x80?)\Z" % (_LINE, _SPACES, _word_begun())
)
_LONGEST_NEAR = 3 + 3 + 1 + _SPACES + len(_NAME)


def names_verdict(text: bytes, *, key: bool = True) -> bool:
    """Whether a `countersign` key stands somewhere in UTF-8; without `key`, its name in quotes."""
    if b"\\u0" not in text and b"\xc5\xbf" not in text and not _mentions(text):
        return False
    return (_KEY if key else _QUOTED).search(text) is not None


def pop_verdict(fields: Object) -> bool:
    """Takes the field out of an object, in whatever letters; whether there was one."""
    found = [name for name in fields if len(name) == len(_NAME) and name.lower().replace("\u017f", "s") == _NAME]
    for name in found:
        del fields[name]
    return bool(found)


def take_out(top: Object) -> bool:
    """Takes the field out of an object, of its choices and their messages, and of an error or an answer in it; whether
    there was one."""
    changed = _take_out(top)
    choices = read_objects(top["choices"]) if "choices" in top else None
    if choices and sum(map(_take_out, choices)):
        top["choices"] = raw(choices)
        changed = True
    return changed


def without_verdict(body: bytes) -> bytes:
    """A body that is not an answer of a known kind, without the field; the same object when it holds none.

    An array, or lines, of objects are read, too, and comments of events. Where the field's name is a key of something
    that cannot be read, which a client may read after all, nothing is left.
    """
    text = as_utf8(body)
    if not names_verdict(text):
        return _without_comments(body, text)
    for spelling in (text, text.decode("utf-8", "replace").encode()):
        top = read_object(spelling)
        if top is not None:
            return write(top) if take_out(top) else body
        items = read_objects(spelling)
        if items is not None:
            return write(items) if sum(map(take_out, items)) else body
    if len(text) > _MOST_READ:
        return b""
    lines = text.split(b"\n")
    for at, line in enumerate(lines):
        if names_verdict(line):
            top = read_object(line)
            if top is None:
                return b""
            if take_out(top):
                lines[at] = write(top)
    rest = b"\n".join(lines)
    return _without_comments(rest, rest) if rest != text else b""


def as_utf8(body: bytes) -> bytes:
    """The text in UTF-8 of JSON as those read it who guess its coding; the same object where it is UTF-8."""
    coding = json.detect_encoding(body[:4])
    return body if coding.startswith("utf-8") else body.decode(coding, "replace").encode("utf-8", "surrogatepass")


class Kind(Enum):
    """What bytes are, by how they begin."""

    JSON = "json"
    EVENTS = "events"
    BYTES = "bytes"


def kind_of(start: bytes) -> Kind | None:
    """What bytes are that begin so, in any coding; None where that cannot be told yet: `START` bytes are enough."""
    text = start.lstrip(_MARKS)
    if text[:1] in (b"{", b"["):
        return Kind.JSON
    if text.startswith(_EVENTS):
        return Kind.EVENTS
    if len(text) < _LONGEST_FIELD and len(start) < START:
        return None
    return Kind.BYTES if text else Kind.JSON


class Guard:
    """Lets bytes of any kind pass, up to a `countersign` key, or a comment of that name. `stopped` is true from there
    on."""

    def __init__(self) -> None:
        self.stopped = False
        # A line begins where all does.
        self._kept = b"\n"
        self._fresh = True

    def push(self, data: bytes) -> bytes:
        """What can go on; what could be the beginning of either is kept until it is not."""
        if self.stopped:
            return b""
        data = self._kept + data
        found = [
            match.start()
            for match in (
                _KEY.search(data) if names_verdict(data) else None,
                _NEAR.search(data) if _mentions(data) else None,
            )
            if match
        ]
        if found:
            self.stopped = True
            self._kept = b""
            return self._given(data[: min(found)])
        key = _BEGUN.search(data, max(0, len(data.rstrip(_SPACE)) - _LONGEST))
        comment = _NEAR_BEGUN.search(data, max(0, len(data) - _LONGEST_NEAR))
        at = min((match.start() for match in (key, comment) if match), default=len(data))
        self._kept = data[at:]
        self.stopped = len(self._kept) > START
        return self._given(data[:at])

    def rest(self) -> bytes:
        """What was kept at the end, and is neither."""
        rest, self._kept = self._kept, b""
        return b"" if self.stopped else self._given(rest)

    def _given(self, data: bytes) -> bytes:
        """Without what was put before the first byte."""
        if self._fresh and data:
            self._fresh = False
            return data[1:]
        return data


def _without_comments(body: bytes, text: bytes) -> bytes:
    if not _mentions(text) or _is_json(text):
        return body
    if len(text) > _MOST_READ:
        return b""
    return _COMMENT.sub(b"", text) if _COMMENT.search(text) is not None else body


def _mentions(text: bytes) -> bool:
    """Whether most of the name stands somewhere, in any letters. Of a large text only a part is copied at a time."""
    parts = (text[at : at + _PART + len(_NAME)] for at in range(0, len(text), _PART)) if len(text) > _PART else (text,)
    return any(b"ountersign" in part.lower() for part in parts)


def _is_json(text: bytes) -> bool:
    return read_object(text) is not None or read_objects(text) is not None or read_value(text) is not None


def _take_out(top: Object) -> bool:
    changed = pop_verdict(top)
    for name in _WITHIN:
        inner = read_object(top[name]) if name in top and names_verdict(bytes(top[name])) else None
        if inner is not None and pop_verdict(inner):
            top[name] = raw(inner)
            changed = True
    return changed
