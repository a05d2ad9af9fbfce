"""The splitter's two ways say the same of every stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.tap.sse import Event, Splitter, replace_data

_pieces = st.sampled_from(
    [
        b"data: ",
        b"data:",
        b"x",
        b"\n",
        b"\n\n",
        b"\r",
        b"\r\n",
        b": c",
        b"\xef\xbb\xbf",
        b"data: yy\n\n",
        b"data: [DONE]\n\n",
    ]
)


def outcome(splitter: Splitter, reads: list[bytes], *, slow: bool) -> tuple[list[Event], bool, int, Event | None]:
    push = splitter._push if slow else splitter.push
    events = [event for read in reads for event in push(read)]
    return events, splitter.overflow, splitter.held, splitter.rest()


@given(st.lists(st.lists(_pieces, max_size=8).map(b"".join), max_size=6), st.sampled_from([5, 9, 12, 1000]))
def test_whole_events_are_cut_as_any_bytes_are(reads: list[bytes], limit: int) -> None:
    fast = outcome(Splitter(limit), reads, slow=False)
    assert fast == outcome(Splitter(limit), reads, slow=True)


def test_other_data_in_the_same_lines() -> None:
    assert replace_data([b"data: a\n", b"\n"], b"b") == b"data: b\n\n"
    assert replace_data([b"data: a\r\n", b"\r\n"], b"b") == b"data: b\r\n\r\n"
    assert replace_data([b"data: a\r\n", b"\n"], b"b") == b"data: b\r\n\n"
    assert replace_data([b"data: a\r", b"\n"], b"b") == b"data: b\r\n"
    assert replace_data([b"data:a\n", b"\n"], b"b") == b"data:b\n\n"
    assert replace_data([b"event: e\n", b"data: a\n", b"data: c\n", b"\n"], b"b") == b"event: e\ndata: b\n\n"
