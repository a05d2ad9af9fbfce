"""Nothing a backend sends makes a tap raise, and reads may cut anywhere."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import InvalidRequest
from policies.evidence import Endpoint, Evidence
from policies.settings import BoundsSettings
from proxy.relay.body import Body
from proxy.tap import open_tap, prepare
from proxy.tap.types import Tap
from tests.proxy.tap.bodies import BACKEND, DONE, MODEL, body, choice, chunk, ending, opening, prepared, usage_chunk

ENDPOINTS: st.SearchStrategy[Endpoint] = st.sampled_from(["chat", "completions"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("token_id:7")
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=8
)
NAMES = st.sampled_from(sorted({*choice(), "message", "text", "stop_reason", "prompt_token_ids", "routed_experts"}))
TOP_NAMES = st.sampled_from(sorted({*body(), "error", "countersign"}))
ASKS = st.fixed_dictionaries(
    {},
    optional={
        "logprobs": st.just(True),
        "return_token_ids": st.just(True),
        "include_reasoning": st.just(False),
        "stream_options": st.just({"include_usage": True}),
    },
)


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    """A choice with some of its fields replaced."""
    return choice() | draw(st.dictionaries(NAMES, VALUES, max_size=3))


@st.composite
def objects(draw: st.DrawFn) -> dict[str, Any]:
    """A chunk or a body with some of its fields replaced."""
    return body(*draw(st.lists(choices(), max_size=3))) | draw(st.dictionaries(TOP_NAMES, VALUES, max_size=2))


EVENTS = st.one_of(
    st.binary(max_size=40),
    objects().map(lambda value: b"data: " + json.dumps(value).encode() + b"\n\n"),
    st.sampled_from([opening(), chunk(choice()), ending(), usage_chunk(), DONE, b": ping\n\n", b"\r", b"\n", b"data:"]),
)


def check(evidence: list[Evidence]) -> None:
    """Shapes and dtypes hold whatever came."""
    assert evidence
    for one in evidence:
        assert one.output_ids.dtype == one.claim_ids.dtype == one.prompt_ids.dtype == np.int32
        assert one.claim_logprobs.dtype == np.float32
        assert one.claim_ids.shape in ((0, 0), (len(one.output_ids), 21))
        assert one.claim_logprobs.shape == one.claim_ids.shape
        assert (one.output_ids >= 0).all()
        assert not np.isnan(one.claim_logprobs).any()


def tap_of(endpoint: Endpoint, asks: dict[str, Any], *, stream: bool) -> Tap:
    if endpoint == "completions":
        asks = {name: value for name, value in asks.items() if name != "include_reasoning"}
    return open_tap(prepared(endpoint, stream=stream, **asks), "public", bounds=BoundsSettings(line_bytes=20_000))


@given(ENDPOINTS, ASKS, st.lists(EVENTS, max_size=8), st.data())
@settings(deadline=None, max_examples=200)
def test_streams(endpoint: Endpoint, asks: dict[str, Any], events: list[bytes], data: st.DataObject) -> None:
    text = b"".join(events)
    whole = tap_of(endpoint, asks, stream=True)
    expected = whole.feed(text)
    expected += whole.close() + whole.done
    check(whole.evidence())

    cut = tap_of(endpoint, asks, stream=True)
    at = data.draw(st.integers(0, len(text)))
    out = cut.feed(text[:at]) + cut.feed(text[at:])
    assert out + cut.close() + cut.done == expected
    for left, right in zip(whole.evidence(), cut.evidence(), strict=True):
        assert left.faults == right.faults
        assert left.text == right.text
        assert (left.output_ids == right.output_ids).all()


@given(ENDPOINTS, ASKS, objects().map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60))
@settings(deadline=None, max_examples=200)
def test_bodies(endpoint: Endpoint, asks: dict[str, Any], text: bytes) -> None:
    tap = tap_of(endpoint, asks, stream=False)
    assert tap.feed(text) == b""
    tap.close()
    check(tap.evidence())


FIELDS = st.sampled_from(
    sorted({*json.loads(prepared().body), "stream", "stream_options", "n", "max_tokens", "stop", "tools", "prompt"})
    + sorted({"tool_choice", "logit_bias", "response_format", "x"})
)


@given(ENDPOINTS, st.dictionaries(FIELDS, VALUES, max_size=5))
@settings(deadline=None, max_examples=200)
def test_requests(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    try:
        result = prepare(Body.read(endpoint, json.dumps(fields).encode()), MODEL, BACKEND, seed=1)
    except InvalidRequest:
        return
    sent = json.loads(result.body)
    assert sent["model"] == "m"
    rewritten = {"logprobs", "top_logprobs", "seed", "stream_options", "include_reasoning", "model"}
    rewritten |= {"return_token_ids", "return_tokens_as_token_ids"}
    for name, value in fields.items():
        if name not in rewritten and value is not None:
            assert sent[name] == value
