"""Time-stamped reads → events: any split of the bytes gives the same events, each stamped by the read that ended it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.overhead.upstream import HEAD, LAST, chunk
from benchmarks.overhead.wire import Read, parse

WORDS = [" one", " zwei", " trois", " 四"]
FRAMES = [f'data: {{"choices":[{{"delta":{{"content":"{word}"}}}}]}}\n\n'.encode() for word in WORDS]
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{}}\n\n'
VERDICT = b': countersign {"id":"0","verdict":"unaudited"}\n\n'
DONE = b"data: [DONE]\n\n"


def stream(*frames: bytes) -> bytes:
    return HEAD + b"".join(map(chunk, frames)) + LAST


def at_once(raw: bytes) -> list[Read]:
    return [(1.0, raw)]


@given(st.sets(st.integers(1, 600)), st.booleans())
def test_any_split_reads_alike(cuts: set[int], joined: bool) -> None:
    frames = [ROLE, *FRAMES, USAGE, VERDICT, DONE]
    raw = stream(b"".join(frames)) if joined else stream(*frames)
    edges = [0, *sorted(cut for cut in cuts if cut < len(raw)), len(raw)]
    reads = [(float(end), raw[start:end]) for start, end in pairwise(edges)]
    response = parse(reads)
    assert response.text == "".join(WORDS)
    assert response.verdict == "unaudited"
    assert response.finished == len(raw)
    for frame, time in zip(FRAMES, response.token_times, strict=True):
        stop = raw.index(frame) + len(frame)
        assert time == min(edge for edge in edges if edge >= stop)


def test_a_frame_may_span_two_http_chunks() -> None:
    frame = FRAMES[0]
    raw = stream(frame[:-1], frame[-1:] + DONE)
    assert parse(at_once(raw)).text == WORDS[0]


def test_headers_are_read_without_case() -> None:
    raw = stream(FRAMES[0], DONE).replace(b"transfer-encoding", b"X-Countersign-Id: abc\r\nTransfer-Encoding")
    response = parse(at_once(raw))
    assert response.headers["x-countersign-id"] == "abc"
    assert np.array_equal(response.token_times, [1.0])


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "no headers"),
        (b"HTTP/1.1 200 OK\r\n", "no headers"),
        (b"nonsense\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n", "status 502"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "not a stream"),
        (stream(FRAMES[0], DONE)[:-9], "cut short"),
        (HEAD + chunk(FRAMES[0])[:-10], "cut short"),
        (stream(FRAMES[0][:-2]), "cut short"),
        (stream(FRAMES[0]), r"no \[DONE\]"),
        (stream(), r"no \[DONE\]"),
        (stream(FRAMES[0], b'data: {"error":{"message":"x"}}\n\n', DONE), "error frame"),
    ],
)
def test_anything_but_a_whole_stream_is_an_error(raw: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(at_once(raw))


def test_no_reads_is_an_error() -> None:
    with pytest.raises(ValueError, match="no answer"):
        parse([])


def test_a_completion_s_tokens_count_even_without_text_and_usage_is_read() -> None:
    parts = [f'data: {{"choices":[{{"index":0,"text":"{word}"}}]}}\n\n'.encode() for word in ("a", "", "b")]
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
    response = parse(at_once(stream(*parts, usage, DONE)))
    assert (response.text, len(response.token_times)) == ("ab", 3)
    assert (response.prompt, response.billed) == (7, 3)
