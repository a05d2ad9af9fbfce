"""Chunks that are read together say what each says by itself."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.evidence import Endpoint, Evidence
from policies.settings import BackendSettings, BoundsSettings, ModelSettings
from proxy.relay.body import Body
from proxy.tap.allowed import allowed
from proxy.tap.collect import Collector
from proxy.tap.prepare import prepare
from proxy.tap.rawjson import Object, read_object
from proxy.tap.together import read_together

_TOKENS = st.one_of(
    st.integers(0, 2**31 - 1).map("token_id:{}".format),
    st.sampled_from(["token_id:-1", "token_id:", "", "x", "7", "token_id:1token_id:2", "token_id:3;token_id:4"]),
)
_USUAL = st.integers(0, 99).map("token_id:{}".format)
_VALUES = st.one_of(st.floats(-50, 0), st.just(-1), st.sampled_from([1e300, None, "x"]))


def _entries(tokens: st.SearchStrategy[str], values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    top = st.fixed_dictionaries({"token": tokens, "logprob": values, "bytes": st.none()})
    return st.fixed_dictionaries({"token": tokens, "logprob": values, "top_logprobs": st.lists(top, max_size=24)})


def _chat(tokens: st.SearchStrategy[str], values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    content = st.lists(_entries(tokens, values), max_size=3)
    logprobs = st.none() | st.fixed_dictionaries({"content": content})
    return st.fixed_dictionaries(
        {"delta": st.fixed_dictionaries({"content": st.text(max_size=3)})},
        optional={
            "index": st.integers(0, 2),
            "token_ids": st.none() | st.lists(st.integers(-1, 99), max_size=3),
            "logprobs": logprobs,
            "finish_reason": st.sampled_from([None, "stop"]),
        },
    )


def _texts(tokens: st.SearchStrategy[str], values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def columns(rows: list[tuple[str, Any, dict[str, Any]]]) -> dict[str, Any]:
        named = zip(("tokens", "token_logprobs", "top_logprobs"), zip(*rows, strict=True), strict=True)
        return {name: list(values) for name, values in named}

    row = st.tuples(tokens, values, st.dictionaries(tokens, values, max_size=22))
    return st.fixed_dictionaries(
        {"text": st.text(max_size=3)},
        optional={
            "token_ids": st.none() | st.lists(st.integers(-1, 99), max_size=3),
            "logprobs": st.none() | st.lists(row, min_size=1, max_size=3).map(columns),
        },
    )


def _collected(endpoint: Endpoint, choices: list[Object], together: bool, most: int) -> list[Evidence]:
    asked: dict[str, Any] = {"model": "m", "n": 2, "max_tokens": most}
    asked["messages" if endpoint == "chat" else "prompt"] = [] if endpoint == "chat" else "x"
    body = Body.read(endpoint, json.dumps(asked).encode())
    backend = BackendSettings(name="b", url="http://b", model="m", runtime="r")
    prepared = prepare(body, ModelSettings(vocab_size=100), backend, seed=1)
    collector = Collector(prepared, allowed(prepared, BoundsSettings()))
    for choice in choices:
        collector.later(choice, 1)
        if not together:
            collector.catch_up()
    return collector.evidence()


def _same(a: Evidence, b: Evidence) -> None:
    for name in ("prompt_ids", "output_ids", "claim_ids", "claim_logprobs"):
        assert np.array_equal(getattr(a, name), getattr(b, name), equal_nan=name == "claim_logprobs"), name
    for name in ("text", "reasoning", "tool_calls", "finish_reason", "complete", "index"):
        assert getattr(a, name) == getattr(b, name), name
    assert set(a.faults) == set(b.faults)


@given(
    st.one_of(
        st.tuples(st.just("chat"), st.lists(_chat(_USUAL, st.floats(-50, 0)), max_size=12)),
        st.tuples(st.just("chat"), st.lists(_chat(_TOKENS, _VALUES), max_size=12)),
        st.tuples(st.just("completions"), st.lists(_texts(_USUAL, st.floats(-50, 0)), max_size=12)),
        st.tuples(st.just("completions"), st.lists(_texts(_TOKENS, _VALUES), max_size=12)),
    ),
    st.sampled_from([1, 1000]),
)
def test_together_or_one_by_one(told: tuple[Endpoint, list[dict[str, Any]]], most: int) -> None:
    endpoint, choices = told
    raws = [read_object(json.dumps(choice).encode()) or {} for choice in choices]
    found, expected = (_collected(endpoint, raws, together, most) for together in (True, False))
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        _same(a, b)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_what_engines_write_is_read_together(endpoint: Endpoint) -> None:
    said: dict[str, Any] = {"delta": {"content": "a"}} if endpoint == "chat" else {"text": "a"}
    entry = {"token": "token_id:1", "logprob": -0.5, "top_logprobs": [{"token": "token_id:1", "logprob": -0.5}]}
    columns = {"tokens": ["token_id:1"], "token_logprobs": [-0.5], "top_logprobs": [{"token_id:1": -0.5}]}
    logprobs = {"content": [entry]} if endpoint == "chat" else columns
    choice = {**said, "index": 0, "token_ids": [1], "logprobs": logprobs}
    bare = {**said, "index": 0, "token_ids": None}
    parts = read_together(endpoint, [read_object(json.dumps(one).encode()) or {} for one in (choice, bare, choice)])
    assert parts is not None
    assert [part.said.text for part in parts] == ["a"] * 3
    assert [None if part.claim is None else list(part.claim.ids) for part in parts] == [[1, 1], None, [1, 1]]
