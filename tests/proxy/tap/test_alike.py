"""Chunks that are like one before them: the client and the evidence get the same as of any others."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policies.evidence import Endpoint, Evidence
from policies.settings import BackendSettings, BoundsSettings, ModelSettings
from proxy.relay.body import Body
from proxy.tap import open_tap
from proxy.tap.prepare import prepare
from proxy.tap.stream import StreamTap

_ENDPOINTS: list[Endpoint] = ["chat", "completions"]
_TEXTS = st.sampled_from(["a", "", ' "},"logprobs":{"', "\\", "\n\n", "é\u2028", '"}]}', "countersign"])
_PLACES: list[Any] = [None, "a", 0.5, -1, [], {"a": 1}, True, 2**70]
_ODD: list[dict[str, Any]] = [
    {"finish_reason": "stop"},
    {"logprobs": None},
    {"token_ids": None},
    {"token_ids": []},
    {"token_ids": [1, 2]},
    {"token_ids": [-1]},
    {"token_ids": [2**40]},
    {"stop_reason": 7},
    {"countersign": {"verdict": "pass"}},
    {"index": 1},
    {"index": 9},
    *({"index": index} for index in _PLACES),
    *({"between": text} for text in (',"x"', ",1", ",{}", ",[1,2]")),
    {"token": "x"},
    {"token": "token_id:99999999999"},
    {"value": 1e300},
    {"value": float("nan")},
    {"top": 0},
    {"top": 30},
    {"usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}},
    {"error": {"message": "no"}},
    {"model": "other"},
    {"deep": 200},
]


def _frame(endpoint: Endpoint, text: str, odd: dict[str, Any]) -> bytes:
    token, value, top = odd.get("token", "token_id:5"), odd.get("value", -0.5), odd.get("top", 3)
    others = [(f"token_id:{at}", -1.0 - at) for at in range(top)]
    logprobs: dict[str, Any] = {"tokens": [token], "token_logprobs": [value], "top_logprobs": [dict(others)]}
    if endpoint == "chat":
        listed = [{"token": name, "logprob": each, "bytes": [1]} for name, each in others]
        logprobs = {"content": [{"token": token, "logprob": value, "bytes": None, "top_logprobs": listed}]}
    if deep := odd.get("deep"):
        logprobs["unknown"] = json.loads("[" * deep + "]" * deep)
    choice: dict[str, Any] = {"index": 0}
    choice |= {"delta": {"content": text}} if endpoint == "chat" else {"text": text}
    choice |= {"logprobs": logprobs, "finish_reason": None, "stop_reason": None, "token_ids": [5]}
    choice |= {name: each for name, each in odd.items() if name in (*choice, "countersign")}
    top_level = {"id": "x", "object": "chunk", "created": 1, "model": "served", "choices": [choice]}
    top_level |= {name: each for name, each in odd.items() if name in ("usage", "error", "model")}
    data = json.dumps(top_level, separators=(",", ":")).encode()
    data = data.replace(b',"finish_reason"', odd.get("between", "").encode() + b',"finish_reason"', 1)
    return b"data: " + data + b"\n\n"


def _read(endpoint: Endpoint, reads: list[bytes], lessons: int | None, **asked: Any) -> tuple[bytes, StreamTap]:
    request: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": 64, **asked}
    request["messages" if endpoint == "chat" else "prompt"] = [] if endpoint == "chat" else "x"
    backend = BackendSettings(name="b", url="http://b", model="served", runtime="r")
    body = Body.read(endpoint, json.dumps(request).encode())
    prepared = prepare(body, ModelSettings(vocab_size=100), backend, seed=1)
    tap = open_tap(prepared, "m", content_type="text/event-stream", bounds=BoundsSettings())
    assert isinstance(tap, StreamTap)
    if lessons is not None:
        tap._lessons = lessons
    shown = b""
    for data in reads:
        shown += tap.feed(data)
        tap.settle()
    return shown + tap.close() + tap.done, tap


def _same(a: Evidence, b: Evidence) -> None:
    for name in ("prompt_ids", "output_ids", "claim_ids", "claim_logprobs"):
        assert np.array_equal(getattr(a, name), getattr(b, name), equal_nan=name == "claim_logprobs"), name
    for name in ("text", "reasoning", "tool_calls", "finish_reason", "complete", "index"):
        assert getattr(a, name) == getattr(b, name), name
    assert set(a.faults) == set(b.faults)


@given(
    st.sampled_from(_ENDPOINTS),
    st.lists(st.tuples(_TEXTS, st.just({}) | st.just({}) | st.sampled_from(_ODD)), max_size=14),
    st.lists(
        st.tuples(st.integers(0, 12_000), st.sampled_from([b"", b"\r", b"\n", b" ", b'"', b"\\", b"[", b"\xff"])),
        max_size=2,
    ),
    st.lists(st.integers(0, 12_000), max_size=3),
    st.sampled_from([{}, {}, {"n": 2}, {"return_token_ids": True}, {"stream_options": {"include_usage": True}}]),
    st.just({}) | st.sampled_from(_ODD),
)
@example("chat", [("c", {}), ("d", {"logprobs": None}), ("e", {})], [], [], {}, {})
@example(
    "completions", [("c", {}), ("d", {"token": "x"}), ("e", {"top": 30}), ("f", {"index": 1})], [], [], {"n": 2}, {}
)
@example("chat", [("c", {"between": ',"x"'}), ("d", {"between": ",1"})], [], [], {}, {})
@example("chat", [("c", {}), ("d", {})], [], [], {}, {"index": None})
@example("completions", [("c", {}), ("d", {})], [], [], {}, {"index": "a"})
def test_like_or_not_it_is_the_same(
    endpoint: Endpoint,
    told: list[tuple[str, dict[str, Any]]],
    changes: list[tuple[int, bytes]],
    cuts: list[int],
    asked: dict[str, Any],
    first: dict[str, Any],
) -> None:
    events = [_frame(endpoint, text, odd) for text, odd in [("a", first), ("b", first), *told]]
    if changes or cuts:
        data = b"".join(events)
        for at, byte in changes:
            data = data[: at % len(data)] + byte + data[at % len(data) + 1 :]
        edges = [0, *sorted(at % len(data) for at in cuts), len(data)]
        events = [data[start:end] for start, end in itertools.pairwise(edges)]
    reads = [*events, b"data: [DONE]\n\n"]
    (shown, tap), (expected, other) = (_read(endpoint, reads, lessons, **asked) for lessons in (None, 0))
    assert shown == expected
    found, wanted = tap.evidence(), other.evidence()
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        _same(a, b)


@pytest.mark.parametrize("endpoint", _ENDPOINTS)
def test_what_engines_write_is_alike(endpoint: Endpoint) -> None:
    frames = [_frame(endpoint, text, {}) for text in ("a", "b", "c", "d")]
    _, tap = _read(endpoint, frames[:1], None)
    assert tap._alike is not None
    for frame in frames[1:]:
        assert tap._alike.read(frame[:-2]) is not None
    shown, tap = _read(endpoint, [frames[0], b"".join(frames[1:])], None)
    assert tap._lessons == 3, "only the first one was looked at in detail"
    assert shown.count(b"token_id:") == shown.count(b'"m"') - 4 == 0
    assert tap.evidence()[0].text == "abcd"


@pytest.mark.parametrize("asked", [{"logprobs": True, "top_logprobs": 1}, {"return_token_ids": True}])
def test_who_asked_for_more_gets_it(asked: dict[str, Any]) -> None:
    _, tap = _read("chat", [_frame("chat", "a", {}), _frame("chat", "b", {})], None, **asked)
    assert tap._alike is None


def test_what_never_repeats_is_not_learned_for_ever() -> None:
    frames = [_frame("chat", "a", {"usage": {"prompt_tokens": 1, "completion_tokens": at}}) for at in range(9)]
    _, tap = _read("chat", frames, None)
    assert tap._alike is None
    assert tap._lessons == 0
