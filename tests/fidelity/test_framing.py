"""Cases 13 to 24: server-sent events, however they are cut, spelled and spread over reads."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fidelity.effort import assert_linear
from tests.fidelity.frames import BODY, DONE, FINISH, ONE, ROLE, STREAM, TWO, chat
from tests.fidelity.gateway import Gateway
from tests.fidelity.meaning import assert_answer, assert_same, events, until_events
from tests.fidelity.timing import Lateness, timing
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, PeerCloses, Step, Until
from tests.support.waiting import PATIENCE

TRIES = 5
FORWARDED = 0.02
"""Seconds within which what came is passed on; a gateway that sleeps before it does sleeps for 25 ms."""
FOREIGN = '{"content":"héllo 😀 日本語"}'
SEPARATORS = '{"content":"a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg"}'
WHOLE = b"".join(STREAM)
SHORT = b"".join((ROLE, chat(FOREIGN), FINISH, DONE))


def _pieces(data: bytes, cuts: list[int]) -> list[Step]:
    """The data as chunks cut there, each a write of its own."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(data)}), len(data)]
    return [wire.SSE_HEAD, *(wire.chunk(data[a:b]) for a, b in itertools.pairwise(edges)), wire.LAST_CHUNK]


def _as_it_is(gateway: Gateway, upstream: FakeBackend, data: bytes) -> None:
    """The client gets the very bytes, in one read and in reads of a byte."""
    for cuts in ([], list(range(len(data)))):
        upstream.script = _pieces(data, cuts)
        answer = gateway.ask(stream=True)
        assert answer.status == 200
        assert_same(answer.body, data, comments=True)
        assert answer.whole


@pytest.mark.cases(13)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
@given(cuts=st.lists(st.integers(1, len(SHORT) - 1), max_size=12), end=st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_cut_anywhere(gateway: Gateway, upstream: FakeBackend, cuts: list[int], end: bytes) -> None:
    data = SHORT.replace(b"\n", end)
    upstream.script = _pieces(data, cuts)
    assert_same(gateway.ask(stream=True).body, data)


@pytest.mark.cases(13, 16)
@pytest.mark.parametrize("end", [b"\r\n", b"\r", b"\n"], ids=["crlf", "cr", "lf"])
def test_a_pause_around_every_line_end(gateway: Gateway, upstream: FakeBackend, end: bytes) -> None:
    data = b"".join((ROLE, FINISH, DONE)).replace(b"\n", end)
    marks = sorted({at + more for at, byte in enumerate(data) if byte in b"\r\n" for more in (0, 1)} - {len(data)})
    edges = [0, *marks, len(data)]
    steps: list[Step] = [wire.SSE_HEAD]
    for a, b in itertools.pairwise(edges):
        steps += [wire.chunk(data[a:b]), 0.03]
    upstream.script = [*steps, wire.LAST_CHUNK]
    assert_same(gateway.ask(stream=True).body, data)


@pytest.mark.cases(14)
def test_a_character_over_several_reads(gateway: Gateway, upstream: FakeBackend) -> None:
    _as_it_is(gateway, upstream, SHORT)


@pytest.mark.cases(15)
def test_only_line_ends_end_lines(gateway: Gateway, upstream: FakeBackend) -> None:
    _as_it_is(gateway, upstream, b"".join((ROLE, chat(SEPARATORS), FINISH, DONE)))


@pytest.mark.cases(16)
@pytest.mark.parametrize("end", [b"\r\n", b"\r", b"\n"], ids=["crlf", "cr", "lf"])
def test_line_ends(gateway: Gateway, upstream: FakeBackend, end: bytes) -> None:
    _as_it_is(gateway, upstream, WHOLE.replace(b"\n", end))


@pytest.mark.cases(16)
def test_mixed_line_ends(gateway: Gateway, upstream: FakeBackend) -> None:
    ends = itertools.cycle([b"\r\n\r\n", b"\n\n", b"\r\r", b"\r\n\n", b"\n\r\n"])
    _as_it_is(gateway, upstream, b"".join(frame.rstrip(b"\n") + next(ends) for frame in STREAM))


@pytest.mark.cases(17)
def test_no_space_after_the_colon(gateway: Gateway, upstream: FakeBackend) -> None:
    _as_it_is(gateway, upstream, WHOLE.replace(b"data: {", b"data:{"))


@pytest.mark.cases(18)
def test_comments_stay_comments(gateway: Gateway, upstream: FakeBackend) -> None:
    comments = (b": ping\n\n", b":\n\n", b": a\n: b\n\n", b":ping\n")
    mixed = b"".join(itertools.chain.from_iterable(zip(comments, STREAM, strict=False))) + b"".join(STREAM[4:])
    _as_it_is(gateway, upstream, mixed)


@pytest.mark.cases(19)
def test_a_byte_order_mark(gateway: Gateway, upstream: FakeBackend) -> None:
    _as_it_is(gateway, upstream, b"\xef\xbb\xbf" + WHOLE)


@pytest.mark.cases(20)
@pytest.mark.feature("line limit")
def test_a_line_without_end(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.script = [
        wire.SSE_HEAD,
        *map(wire.chunk, (ROLE, ONE)),
        *[wire.chunk(b"data: " + b"x" * 262_144)[:-2] + b"\r\n"] * 100,
        PeerCloses(),
    ]
    answer = gateway.ask(stream=True)
    assert "error" in events(answer.body)[-1][1]
    assert b"[DONE]" not in answer.body
    assert upstream.last.peer_closed.wait(PATIENCE)


@pytest.mark.cases(21)
def test_reading_is_linear(gateway: Gateway, upstream: FakeBackend) -> None:
    def read(size: int) -> None:
        data = b"".join((ROLE, chat('{"content":"' + "x" * size + '"}'), FINISH, DONE))
        one_by_one = b"".join(wire.chunk(data[at : at + 1]) for at in range(len(data)))
        writes = [one_by_one[at : at + 8192] for at in range(0, len(one_by_one), 8192)]
        upstream.script = [wire.SSE_HEAD, *writes, wire.LAST_CHUNK]
        assert_same(gateway.ask(stream=True).body, data)

    assert_linear(gateway, read, 200_000)


@pytest.mark.cases(22)
def test_the_last_chunk_and_done_are_two_events(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.script = _pieces(WHOLE, [])
    body = gateway.ask(stream=True).body
    assert_same(body, WHOLE)
    assert events(body)[-1] == ("", "[DONE]")
    assert events(body)[-2][1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.cases(23)
@pytest.mark.parametrize(
    ("kind", "body"), [("application/json", BODY), ("text/html", b"<html>busy</html>"), ("text/plain", b"busy\n")]
)
def test_what_is_no_stream_passes_as_it_is(gateway: Gateway, upstream: FakeBackend, kind: str, body: bytes) -> None:
    upstream.script = [wire.whole(body, 200, kind)]
    answer = gateway.ask(stream=True)
    assert_answer(answer, 200, body)
    assert answer.header("content-type").partition(";")[0] == kind
    assert answer.whole


@pytest.mark.cases(23)
def test_what_is_no_stream_and_breaks_off_does_not_end_well(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.script = [wire.head(200, "text/plain", "content-length: 100"), b"half", Close()]
    answer = gateway.ask(stream=True)
    assert answer.status >= 500 or not answer.whole


@pytest.mark.cases(24)
def test_a_chunk_is_there_before_the_next_one(gateway: Gateway, upstream: FakeBackend) -> None:
    tries = [_on_the_way(gateway, upstream) for _ in range(TRIES if timing.asserted else 1)]
    medians = [statistics.median(each) for each in zip(*tries, strict=True)]
    assert max(medians) < FORWARDED or not timing.asserted, medians


def _on_the_way(gateway: Gateway, upstream: FakeBackend) -> list[float]:
    """How long each chunk of a stream was on its way, none of which came before the client had the one before; then
    its end and a whole answer. Seconds, less what the machine was late."""
    frames = (ROLE, ONE, TWO, TWO, TWO)
    seen = [threading.Event() for _ in frames]
    steps: list[Step] = [wire.SSE_HEAD]
    for frame, event in zip(frames, seen, strict=True):
        steps += [wire.chunk(frame), Until(event)]
    upstream.script = [*steps, *map(wire.chunk, (FINISH, DONE)), wire.LAST_CHUNK]
    took = []

    def until(read: Callable[[], bytes], want: bytes) -> None:
        with Lateness(gateway.pid) as late:
            got = read()
            there = time.monotonic()
        took.append(there - upstream.last.sent[-1] - late.seconds)
        assert_same(got, want)

    with gateway.call(stream=True) as call:
        for at, event in enumerate(seen, 1):
            until(lambda: until_events(call, at), b"".join(frames[:at]))  # noqa: B023 - called at once
            event.set()
        until(lambda: call.answer().body, b"".join((*frames, FINISH, DONE)))
    upstream.script = [wire.whole(BODY)]
    until(lambda: gateway.ask().body, BODY)
    return took
