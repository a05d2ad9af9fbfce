"""What an honest proxy records of a request is what everybody reads in that request."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from policies import codec
from policies._requested import NEVER_SENT, compare_request
from policies.evidence import Evidence
from policies.settings import BackendSettings, ModelSettings
from proxy.relay.body import Body
from proxy.tap.fields import GONE
from proxy.tap.prepare import prepare

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
BODIES: list[dict[str, Any]] = [
    {},
    {"stream": True, "n": 3, "seed": 7, "max_tokens": 5},
    {
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": -1,
        "max_completion_tokens": 5,
        "max_tokens": 9,
    },
    {"temperature": "0.7", "top_p": None, "top_k": 5.0, "seed": "11", "max_tokens": "12", "min_tokens": 2},
    {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.001, "repetition_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": -1},
    {
        "temperature": 1e300,
        "top_k": 1e300,
        "seed": 2**70,
        "max_tokens": 10**30,
        "logit_bias": {"5": 1, "x": 2, "6": "3"},
    },
    {
        "stop": ["a", "\ud800"],
        "stop_token_ids": [5],
        "bad_words": ["b"],
        "ignore_eos": "yes",
        "allowed_token_ids": [5, 6],
    },
    {"response_format": {"type": "json_object"}, "include_reasoning": False, "include_stop_str_in_output": 1},
    {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}], "tool_choice": "auto"},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"priority": 3, "echo": False, "chat_template": None, "best_of": 1, "thinking_token_budget": 5, "seed": 1.0},
    {"return_token_ids": True, "return_tokens_as_token_ids": True, "countersign": {"x": 1}},
]


@pytest.mark.parametrize("fields", BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("buffered", [False, True], ids=["as asked", "buffered"])
def test_evidence_is_of_its_request(fields: dict[str, Any], endpoint: str, buffered: bool) -> None:
    whole = {**(CHAT if endpoint == "chat" else {"model": "m", "prompt": ["x", "y"]}), **fields}
    data = json.dumps(whole).encode()
    model = ModelSettings(generation_config={"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 40}, grammar="tools")
    backend = BackendSettings(
        name="b",
        url="http://127.0.0.1:1/v1",
        model="m",
        served_model="s",
        routed_experts="buffer" if buffered else "stream",
    )
    prepared = prepare(Body.read(endpoint, data), model, backend, seed=2**61 + 1)
    seed = prepared.sampling.seed or 0
    choices = [
        Evidence(
            id="a" * 32,
            endpoint=prepared.endpoint,
            backend="b",
            model="m",
            sampling=replace(prepared.sampling, seed=seed + index % prepared.n),
            index=index,
            request=prepared.body,
            asked=data,
        )
        for index in range(prepared.n * prepared.prompts)
    ]
    kept = codec.unpack(codec.pack(choices))
    assert compare_request(kept, data).wrong == []
    assert compare_request(kept, b"").wrong == []


def test_what_never_goes_up() -> None:
    assert NEVER_SENT == GONE
