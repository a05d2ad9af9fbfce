"""Case 13, without gaps: streams with everything in them, cut at every offset there is."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fidelity.frames import CANONICAL, EVERYTHING
from tests.fidelity.gateway import Gateway
from tests.fidelity.meaning import assert_same, events
from tests.support import wire
from tests.support.fake_backend import FakeBackend, Received, Step

APART = 0.001
"""Seconds between two writes, so that they are two reads."""
ASKED: dict[str, Any] = {
    "stream": True,
    "logprobs": True,
    "top_logprobs": 2,
    "stream_options": {"include_usage": True},
}


def _cut(data: bytes, *cuts: int) -> list[Step]:
    edges = [0, *cuts, len(data)]
    pieces = [wire.chunk(data[a:b]) for a, b in itertools.pairwise(edges) if a < b]
    return [wire.SSE_HEAD, *(step for piece in pieces for step in (piece, APART)), wire.LAST_CHUNK]


@pytest.mark.cases(13, 14, 16)
@pytest.mark.parametrize("name", CANONICAL)
def test_cut_in_two_at_every_offset(gateway: Gateway, upstream: FakeBackend, name: str) -> None:
    data = CANONICAL[name]

    def script(request: Received) -> list[Step]:
        return _cut(data, json.loads(request.body)["x_cut"])

    def one(offset: int) -> tuple[int, bytes]:
        return offset, gateway.ask(**ASKED, x_cut=offset).body

    upstream.script = script
    with ThreadPoolExecutor(4) as pool:
        for offset, body in pool.map(one, range(1, len(data))):
            assert len(events(body)) == len(events(data)), offset
            assert_same(body, data, comments=True)


ODDITIES = st.sampled_from(
    [b": c\n", b"\n", b"\n\n", b"id: 7\n", b"retry: 10\n", b"event: x\n", b"data\n", b"x: y\n", b":\n", b": \xc3\xa9\n"]
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """A stream with odd lines between its events, each line with an end of its own."""
    parts: list[bytes] = []
    for event in EVERYTHING:
        if draw(st.integers(0, 3)) == 0:
            parts.append(draw(ODDITIES))
        parts.append(event.replace(b"data: ", b"data:", draw(st.integers(0, 1))))
    mark = b"\xef\xbb\xbf" if draw(st.integers(0, 5)) == 0 else b""
    if draw(st.booleans()):
        return mark + b"".join(parts).replace(b"\n", draw(ENDS))
    mixed = mark
    for line in b"".join(parts).split(b"\n")[:-1]:
        joins = not line and mixed.endswith(b"\r")  # CR and LF would be one end
        mixed += line + draw(ENDS.filter(lambda end: end != b"\n") if joins else ENDS)
    return mixed


@pytest.mark.cases(13, 16, 17, 18)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
@given(data=streams(), cuts=st.lists(st.floats(0, 1), max_size=8))
def test_odd_streams_cut_anywhere(gateway: Gateway, upstream: FakeBackend, data: bytes, cuts: list[float]) -> None:
    upstream.script = _cut(data, *sorted({int(cut * len(data)) for cut in cuts}))
    body = gateway.ask(**ASKED).body
    assert_same(body, data, comments=True)


@pytest.mark.cases(13, 16)
@pytest.mark.parametrize(
    "end", [a + b for a in (b"\n", b"\r\n", b"\r") for b in (b"\n", b"\r\n", b"\r") if (a, b) != (b"\r", b"\n")]
)
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_last_line_cut_inside_its_end(gateway: Gateway, upstream: FakeBackend, end: bytes, cut: int) -> None:
    """Every pair of line ends; the two writes lie far enough apart to be two reads on any machine."""
    data = b"".join(EVERYTHING)
    data = data[: data.index(b"[DONE]") + len(b"[DONE]")] + end
    upstream.script = [wire.SSE_HEAD, wire.chunk(data[:-cut]), 0.05, wire.chunk(data[-cut:]), wire.LAST_CHUNK]
    assert_same(gateway.ask(**ASKED).body, data, comments=True)
