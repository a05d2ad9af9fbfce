"""What of a backend's could be taken for our verdict: a `countersign` field where ours stands, or could stand.

It is looked for in the bytes, whatever they are called: clients read JSON without a look at its content type, spelled
with escapes, and in UTF-16 or UTF-32 as well as in UTF-8.
"""

from __future__ import annotations

import json
import re
from enum import Enum

from proxy.tap.rawjson import Object, raw, read_object, read_objects, write

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
    return rb"(?:%c|\\u00(?i:%02x))" % (ord(letter), ord(letter))


def _begun() -> bytes:
    """Whatever is a beginning of the quoted name, up to its last character."""
    rest = rb'(?:"[ \t\r\n]*)?'
    for letter in reversed(_NAME):
        rest = rb"(?:" + _spelled(letter) + rest + rb"|\\u?0{0,2}[67]?)?"
    return rest


_QUOTED = re.compile(b'"' + b"".join(map(_spelled, _NAME)) + b'"')
_KEY = re.compile(_QUOTED.pattern + rb"[ \t\r\n]*:")
_COMMENT = re.compile(rb"(?:\A|(?<=[\r\n]))(?:\xef\xbb\xbf)?:[^A-Za-z{\r\n]*(?i:countersign)[^\r\n]*")
_BEGUN = re.compile(b'"' + _begun() + rb"\Z")
_LONGEST = 2 + 6 * len(_NAME)


def names_verdict(text: bytes, *, key: bool = True) -> bool:
    """Whether a `countersign` key stands somewhere in UTF-8; without `key`, its name in quotes."""
    if b"ountersign" not in text and b"\\u00" not in text:
        return False
    return (_KEY if key else _QUOTED).search(text) is not None


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
        return body if kind_of(text[:START]) is Kind.JSON else _without_comments(body, text)
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
    return rest if rest != text else b""


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
    """Lets bytes of any kind pass, up to a `countersign` key. `stopped` is true from there on."""

    def __init__(self) -> None:
        self.stopped = False
        self._kept = b""

    def push(self, data: bytes) -> bytes:
        """What can go on; what could be the beginning of the key is kept until it is not."""
        if self.stopped:
            return b""
        data = self._kept + data
        found = _KEY.search(data) if names_verdict(data) else None
        if found is not None:
            self.stopped = True
            self._kept = b""
            return data[: found.start()]
        begun = _BEGUN.search(data, max(0, len(data.rstrip(_SPACE)) - _LONGEST))
        at = len(data) if begun is None else begun.start()
        self._kept = data[at:]
        self.stopped = len(self._kept) > START
        return data[:at]

    def rest(self) -> bytes:
        """What was kept at the end, and is no key."""
        rest, self._kept = self._kept, b""
        return b"" if self.stopped else rest


def _without_comments(body: bytes, text: bytes) -> bytes:
    if b"countersign" not in text.lower():
        return body
    if len(text) > _MOST_READ:
        return b""
    return _COMMENT.sub(b"", text) if _COMMENT.search(text) is not None else body


def _take_out(top: Object) -> bool:
    changed = top.pop(_NAME, None) is not None
    for name in _WITHIN:
        inner = read_object(top[name]) if name in top and names_verdict(bytes(top[name])) else None
        if inner is not None and inner.pop(_NAME, None) is not None:
            top[name] = raw(inner)
            changed = True
    return changed
