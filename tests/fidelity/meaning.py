"""Whether what came is what was said: byte for byte, or in other bytes that mean the same.

Our own proxy is held to the bytes at once. Another gateway may spell events and JSON in its own way (white space,
order and escapes of members, members that are null): that is noted, the test goes on, and in the end it fails as
`OtherBytes`, so that a table can tell it from a wrong answer and from a feature that is not there.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from tests.support.raw_http import Answer, Call

Event = tuple[str, Any]
"""Type (empty: none was named) and data of one event; the data as JSON where it is JSON."""

_LINE_END = re.compile(r"\r\n|\n|\r")


class Lacking(AssertionError):
    """The gateway has no such feature."""


class OtherBytes(AssertionError):
    """The same meaning, spelled otherwise."""


class _Notes:
    """What was said otherwise in the test that runs. `lenient` is set where another gateway is under test."""

    def __init__(self) -> None:
        self.lenient = False
        self.found: list[str] = []


notes = _Notes()


def lacking(what: str) -> NoReturn:
    """End the test: there is no such feature."""
    raise Lacking(what)


def assert_same(got: bytes, want: bytes, *, comments: bool = False, nulls: bool = False) -> None:
    """Asserts that `got` says what `want` says.

    Args:
        got: a body, or a part of a request's.
        want: what was said, an event stream or one document.
        comments: a stream's comments are part of it.
        nulls: a member that is null is another thing than none.
    """
    if got == want:
        return
    if not notes.lenient:
        assert got == want
    if b"data:" in want:
        assert _plain(events(got), nulls) == _plain(events(want), nulls)
        assert not comments or comments_of(got) == comments_of(want)
    else:
        assert _plain(_parsed(got.decode()), nulls) == _plain(_parsed(want.decode()), nulls)
    notes.found.append(_first_difference(got, want))


def assert_answer(answer: Answer, status: int, body: bytes) -> None:
    """Asserts a status and what was said."""
    assert answer.status == status
    assert_same(answer.body, body)


def assert_begins(got: bytes, want: bytes) -> None:
    """Asserts that a stream begins with what the events of `want` say."""
    if got.startswith(want):
        return
    said = events(want)
    assert notes.lenient
    assert _plain(events(got)[: len(said)], nulls=False) == _plain(said, nulls=False)
    notes.found.append(_first_difference(got[: len(want)], want))


def lines(body: bytes) -> list[str]:
    """The lines of an event stream, as the standard ends them."""
    return _LINE_END.split(body.decode().removeprefix("\ufeff"))


def events(body: bytes) -> list[Event]:
    """The events of a stream, as the standard reads them; one that is not ended by an empty line is none."""
    found: list[Event] = []
    kind = ""
    data: list[str] = []
    for line in lines(body):
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                found.append((kind, _parsed("\n".join(data))))
            kind, data = "", []
        elif name == "data":
            data.append(value)
        elif name == "event":
            kind = value
    return found


def comments_of(body: bytes) -> list[str]:
    """The comments of a stream."""
    return [line[1:].strip() for line in lines(body) if line.startswith(":")]


def until_events(call: Call, count: int) -> bytes:
    """Read on until so many events have come; returns the body so far."""
    answer = call.head()
    while len(events(_whole_characters(answer.body))) < count:
        assert next(call.pieces(), None) is not None, answer.body
    return answer.body


def _whole_characters(body: bytes) -> bytes:
    return body.decode(errors="ignore").encode()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _plain(value: Any, nulls: bool) -> Any:
    """The value with nothing left of how it was spelled; `json` keeps 1 and 1.0 apart, and true from 1."""
    return json.dumps(value if nulls else _without_nulls(value), sort_keys=True)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _first_difference(got: bytes, want: bytes) -> str:
    at = next((at for at, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
    return f"byte {at}: {got[at : at + 40]!r} for {want[at : at + 40]!r}"
