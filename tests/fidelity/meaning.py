"""Whether what came is what was said: byte for byte, or in other bytes that mean the same.

Our own proxy is held to the bytes at once. Another gateway may spell events and JSON in its own way (white space,
order and escapes of members, members that are null), name and date an answer anew (`id`, `created`, `model`) and add
members of its own: that is noted, the test goes on, and in the end it fails as `OtherBytes`, so that a table can tell
it from a wrong answer and from a feature that is not there.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from tests.support.raw_http import Answer, Call

Event = tuple[str, Any]
"""Type (empty: none was named) and data of one event; the data as JSON where it is JSON."""

RESTATED = frozenset({"id", "created", "created_at", "model"})
NAMED: tuple[tuple[str | int, ...], ...] = ((), ("response",), ("message",))
"""Where an answer has a name and a date: itself, and in events of the Responses and Messages endpoints."""
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
        nulls: in deltas nothing is added, and a member that is null is another thing than none.
    """
    if got == want:
        return
    if not notes.lenient:
        assert got == want
    if b"data:" in want:
        _assert_events(events(got), events(want), nulls=nulls)
        assert not comments or comments_of(got) == comments_of(want), "other comments"
    else:
        _assert_says(_parsed(got.decode()), _parsed(want.decode()), nulls=nulls)
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
    _assert_events(events(got)[: len(said)], said, nulls=False)
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


def _assert_events(got: list[Event], want: list[Event], *, nulls: bool) -> None:
    assert len(got) == len(want), f"{len(got)} events, not {len(want)}"
    assert [kind for kind, _ in got] == [kind for kind, _ in want], "other types of events"
    for (_, mine), (_, theirs) in zip(got, want, strict=True):
        _assert_says(mine, theirs, nulls=nulls)


def _assert_says(got: Any, want: Any, *, nulls: bool, at: tuple[str | int, ...] = ()) -> None:
    """Asserts that one JSON value says what another does."""
    where = ".".join(map(str, at))
    exact = nulls and "delta" in at
    if isinstance(want, dict) and isinstance(got, dict):
        restated = RESTATED if at in NAMED else frozenset()
        for name in want.keys() - restated:
            if want[name] is not None or exact:
                assert name in got, f"{where}.{name} is gone"
                _assert_says(got[name], want[name], nulls=nulls, at=(*at, name))
        added = got.keys() - want.keys() - restated
        assert not (exact and added), f"{where} has {sorted(added)}"
    elif isinstance(want, list) and isinstance(got, list):
        assert len(got) == len(want), f"{where} has {len(got)} items, not {len(want)}"
        for number, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            _assert_says(mine, theirs, nulls=nulls, at=(*at, number))
    else:  # spelled, for `json` keeps 1 and 1.0 apart, and true from 1
        assert json.dumps(got) == json.dumps(want), f"{where} is {json.dumps(got)}, not {json.dumps(want)}"


def _first_difference(got: bytes, want: bytes) -> str:
    at = next((at for at, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
    return f"byte {at}: {got[at : at + 40]!r} for {want[at : at + 40]!r}"
