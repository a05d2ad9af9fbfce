"""What counts as the same meaning where another gateway is under test, and what does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fidelity.frames import BODY, CANONICAL, DONE, MESSAGE, ONE, ROLE, STREAM, TWO, chat
from tests.fidelity.meaning import assert_begins, assert_same, comments_of, events, notes

WHOLE = b"".join(STREAM)


@pytest.fixture(autouse=True)
def lenient() -> Iterator[None]:
    """As for another gateway; nothing of it is left behind."""
    before = notes.lenient
    notes.lenient = True
    yield
    notes.lenient, notes.found = before, []


@pytest.mark.ours
@pytest.mark.parametrize(
    ("got", "want"),
    [
        (WHOLE.replace(b":", b": ").replace(b"data:  ", b"data: "), WHOLE),
        (WHOLE.replace(b"\n", b"\r\n"), WHOLE),
        (WHOLE.replace(b'"created":1', b'"created":99'), WHOLE),
        (WHOLE.replace(b',"logprobs":null', b""), WHOLE),
        (WHOLE.replace(b'"object"', b'"x_more":[1],"object"'), WHOLE),
        (b": ping\n\n" + WHOLE, WHOLE),
        (BODY.replace(b"One", b"\\u004fne"), BODY),
        (b"".join(MESSAGE).replace(b'"model":"m"', b'"model":"other"'), b"".join(MESSAGE)),
    ],
    ids=["spaces", "line ends", "date", "nulls", "more", "comment", "escapes", "model"],
)
def test_the_same_meaning_is_noted_as_other_bytes(got: bytes, want: bytes) -> None:
    assert got != want
    assert_same(got, want)
    assert len(notes.found) == 1
    notes.found = []


@pytest.mark.ours
@pytest.mark.parametrize(
    ("got", "want"),
    [
        (WHOLE.replace(b"two", b"too"), WHOLE),
        (WHOLE.replace(DONE, b""), WHOLE),
        (WHOLE + DONE, WHOLE),
        (WHOLE.replace(ONE + TWO, chat('{"content":"One two"}')), WHOLE),
        (WHOLE.replace(b'"finish_reason":"stop"', b'"finish_reason":null'), WHOLE),
        (WHOLE.replace(b'"index":0', b'"index":false'), WHOLE),
        (BODY.replace(b'"total_tokens":7', b'"total_tokens":7.0'), BODY),
        (BODY[:-1], BODY),
        (b"".join(MESSAGE).replace(b"event: message_stop\n", b""), b"".join(MESSAGE)),
        (CANONICAL["lf"].replace(b'"id":"c"', b'"id":"d"'), CANONICAL["lf"]),
    ],
    ids=["text", "no done", "two dones", "merged", "reason", "type", "number", "cut", "event", "id of a call"],
)
def test_another_meaning_is_wrong(got: bytes, want: bytes) -> None:
    assert got != want
    with pytest.raises(AssertionError):
        assert_same(got, want)


@pytest.mark.ours
def test_what_a_case_is_about_is_not_forgiven() -> None:
    said = chat('{"content":null,"x":1}')
    without, more = said.replace(b'"content":null,', b""), said.replace(b'"x":1', b'"x":1,"type":"y"')
    for got in (without, more):
        assert_same(got, said)
        with pytest.raises(AssertionError):
            assert_same(got, said, nulls=True)
    with pytest.raises(AssertionError):
        assert_same(ROLE, b": ping\n\n" + ROLE, comments=True)
    notes.found = []


@pytest.mark.ours
def test_our_own_is_held_to_the_bytes() -> None:
    notes.lenient = False
    with pytest.raises(AssertionError):
        assert_same(WHOLE.replace(b'"created":1', b'"created": 1'), WHOLE)


@pytest.mark.ours
def test_a_beginning() -> None:
    assert_begins(WHOLE.replace(b":1,", b": 1,"), ROLE + ONE)
    with pytest.raises(AssertionError):
        assert_begins(ROLE, ROLE + ONE)
    with pytest.raises(AssertionError):
        assert_begins(ROLE + TWO, ROLE + ONE)
    notes.found = []


@pytest.mark.ours
def test_events_are_read_as_the_standard_says() -> None:
    body = b'\xef\xbb\xbfdata: a\r\ndata:b\r\r\nevent: x\n: note\ndata: {"a": 1}\n\nid: 7\n\ndata: lost'
    assert events(body) == [("", "a\nb"), ("x", {"a": 1})]
    assert comments_of(body) == ["note"]
