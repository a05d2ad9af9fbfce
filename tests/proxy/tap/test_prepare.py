from __future__ import annotations

import json
from typing import Any

import pytest

from policies.errors import InvalidRequest
from policies.evidence import Endpoint
from proxy.relay.body import Body
from proxy.tap import prepare
from proxy.tap.types import Prepared
from tests.proxy.tap.bodies import BACKEND, MODEL, backend, model, prepared


def sent(result: Prepared) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(result.body)
    return fields


def test_chat_asks_for_evidence() -> None:
    fields = sent(prepared())
    assert fields == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "seed": 100,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "logprobs": True,
        "top_logprobs": 20,
        "return_tokens_as_token_ids": True,
        "include_reasoning": True,
        "return_token_ids": True,
    }


def test_completions_ask_for_evidence() -> None:
    fields = sent(prepared("completions"))
    assert fields["logprobs"] == 20
    assert fields["max_tokens"] == 16
    assert "top_logprobs" not in fields
    assert "include_reasoning" not in fields


def test_untouched_fields_keep_their_bytes() -> None:
    text = b'{"model":"m","messages":[ {"role":"user","content":"\\u00e9\xc3\xa9"} ],"x_unknown":{"a" : 1.50e0},"n":1}'
    result = prepare(Body.read("chat", text), MODEL, BACKEND, seed=1)
    assert b'"messages":[ {"role":"user","content":"\\u00e9\xc3\xa9"} ]' in result.body
    assert b'"x_unknown":{"a" : 1.50e0}' in result.body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"nothing",
        b"1",
        b'{"a":1,"a":2}',
        b'{"a":{"b":1,"b":2}}',
        b'{"model":"m","\\u006dodel":"n"}',
        b'{"temperature":NaN}',
        b'{"temperature":Infinity}',
        b"\xff\xfe{}",
        b'{"a":"\xff"}',
        b"[" * 100_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b'{"seed":' + b"9" * 5_000 + b"}",
    ],
)
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        prepare(Body.read("chat", body), MODEL, BACKEND, seed=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_transfer_params", {"prompt_token_ids": [1]}),
        ("ec_transfer_params", {"a": 1}),
        ("prompt_logprobs", 0),
        ("prompt_logprobs", 5),
        ("logprob_token_ids", [1]),
        ("use_beam_search", True),
        ("vllm_xargs", {"a": 1}),
        ("chat_template", ""),
        ("prompt_embeds", "AA=="),
        ("echo", True),
        ("routed_experts_prompt_start", 3),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_refused_fields_are_named(endpoint: Endpoint, name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepared(endpoint, **{name: value})
    assert caught.value.body()["error"]["param"] == name
    assert caught.value.status == 400


def test_template_in_template_kwargs_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepared(chat_template_kwargs={"chat_template": "{{ x }}"})
    assert caught.value.param == "chat_template_kwargs"
    assert sent(prepared(chat_template_kwargs={"enable_thinking": False}))["chat_template_kwargs"]


@pytest.mark.parametrize(
    ("name", "value"), [("echo", False), ("kv_transfer_params", None), ("use_beam_search", False), ("vllm_xargs", {})]
)
def test_refused_fields_that_say_nothing_are_dropped(name: str, value: Any) -> None:
    assert name not in sent(prepared(**{name: value}))


@pytest.mark.parametrize("name", ["priority", "request_id", "session_id", "best_of", "countersign"])
def test_dropped_fields(name: str) -> None:
    fields: dict[str, Any] = {name: 1}
    assert name not in sent(prepared(**fields))


def test_defaults_come_from_request_then_model_then_vllm() -> None:
    config = {"temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 9}
    body = b'{"model":"m","messages":[],"temperature":null,"top_k":5}'
    result = prepare(Body.read("chat", body), model(generation_config=config), BACKEND, seed=1)
    fields = sent(result)
    assert (fields["temperature"], fields["top_k"], fields["top_p"]) == (0.6, 5, 1.0)
    assert (result.sampling.temperature, result.sampling.top_k, result.sampling.top_p) == (0.6, 5, 1.0)
    # Explicit, vLLM would refuse it where the prompt leaves less room; as its own default, it cuts it.
    assert "max_tokens" not in fields
    assert result.sampling.max_tokens == 9


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 3}, 3),
        ({"max_tokens": None}, None),
    ],
)
def test_chat_limit(fields: dict[str, Any], limit: int | None) -> None:
    assert prepared(**fields).sampling.max_tokens == limit


def test_completion_limit() -> None:
    assert prepared("completions", max_tokens=None).sampling.max_tokens == 16
    assert sent(prepared("completions", max_tokens=None))["max_tokens"] == 16
    assert sent(prepared("completions", max_tokens=0))["max_tokens"] == 0


@pytest.mark.parametrize(
    ("value", "seed", "own"),
    [(None, 100, False), (-1, 100, False), ("-1", 100, False), (0, 0, True), (5, 5, True), ("5", 5, True)],
)
def test_seed(value: Any, seed: int, own: bool) -> None:
    result = prepared(seed=value)
    assert result.sampling.seed == seed
    assert result.sampling.client_seed is own
    assert int(sent(result)["seed"]) == seed


def test_big_seed_survives() -> None:
    assert sent(prepared(seed=2**63 - 1))["seed"] == 2**63 - 1


@pytest.mark.parametrize(
    ("fields", "asked", "top"),
    [
        ({}, None, 20),
        ({"logprobs": False, "top_logprobs": 0}, None, 20),
        ({"logprobs": None, "top_logprobs": None}, None, 20),
        ({"logprobs": True}, 0, 20),
        ({"logprobs": True, "top_logprobs": None}, 0, 20),
        ({"logprobs": True, "top_logprobs": 5}, 5, 20),
        ({"logprobs": True, "top_logprobs": 20}, 20, 20),
        ({"logprobs": True, "top_logprobs": 30}, 30, 30),
        ({"logprobs": True, "top_logprobs": -1}, -1, -1),
        ({"logprobs": "yes", "top_logprobs": 5.0}, 5, 20),
    ],
)
def test_chat_logprobs(fields: dict[str, Any], asked: int | None, top: int) -> None:
    result = prepared(**fields)
    assert result.asked.logprobs == asked
    assert sent(result)["logprobs"] is True
    assert sent(result)["top_logprobs"] == top


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 3},
        {"logprobs": False, "top_logprobs": 3},
        {"logprobs": None, "top_logprobs": -1},
        {"logprobs": True, "top_logprobs": -2},
        {"logprobs": True, "top_logprobs": "5"},
        {"logprobs": True, "top_logprobs": 2.5},
        {"logprobs": "maybe"},
        {"logprobs": 5},
        {"top_logprobs": []},
    ],
)
def test_chat_logprobs_that_vllm_refuses_stay_so(fields: dict[str, Any]) -> None:
    got = sent(prepared(**fields))
    assert {name: got.get(name) for name in ("logprobs", "top_logprobs")} == {
        name: fields.get(name) for name in ("logprobs", "top_logprobs")
    }


@pytest.mark.parametrize(
    ("value", "asked", "top"), [(None, None, 20), (0, 0, 20), (7, 7, 20), (25, 25, 25), (-1, -1, -1)]
)
def test_completion_logprobs(value: Any, asked: int | None, top: int) -> None:
    result = prepared("completions", logprobs=value)
    assert result.asked.logprobs == asked
    assert sent(result)["logprobs"] == top


@pytest.mark.parametrize("value", [-2, "5", 1.5, [1]])
def test_completion_logprobs_that_vllm_refuses_stay_so(value: Any) -> None:
    assert sent(prepared("completions", logprobs=value))["logprobs"] == value


def test_without_tokenizer_wanted_strings_stay_strings() -> None:
    body = b'{"model":"m","messages":[],"logprobs":true,"top_logprobs":2}'
    result = prepare(Body.read("chat", body), model(), BACKEND, seed=1)
    assert not result.ids_as_tokens
    assert "return_tokens_as_token_ids" not in sent(result)
    assert prepare(Body.read("chat", b'{"messages":[]}'), model(), BACKEND, seed=1).ids_as_tokens


@pytest.mark.parametrize(
    ("options", "usage", "sent_options"),
    [
        (None, False, {"include_usage": True}),
        ({}, False, {"include_usage": True}),
        ({"include_usage": False, "continuous_usage_stats": True}, False, {"include_usage": True}),
        ({"include_usage": None, "x": [1]}, False, {"include_usage": True, "x": [1]}),
        (
            {"include_usage": True, "continuous_usage_stats": True},
            True,
            {"include_usage": True, "continuous_usage_stats": True},
        ),
        ({"include_usage": "perhaps"}, False, {"include_usage": "perhaps"}),
        ("no object", False, "no object"),
        (0, False, 0),
    ],
)
def test_stream_options(options: Any, usage: bool, sent_options: Any) -> None:
    result = prepared(stream=True, stream_options=options)
    assert result.upstream_stream
    assert result.asked.stream
    assert result.asked.usage is usage
    assert sent(result)["stream_options"] == sent_options


def test_stream_options_without_stream_stay_wrong() -> None:
    result = prepared(stream_options={"include_usage": True})
    assert sent(result)["stream_options"] == {"include_usage": True}
    assert not result.upstream_stream


def test_buffered_backend_is_asked_without_streaming() -> None:
    server = backend(routed_experts="buffer")
    result = prepared(server=server, stream=True, stream_options={"include_usage": True})
    assert result.asked.stream
    assert result.asked.usage
    assert not result.upstream_stream
    assert sent(result)["stream"] is False
    assert "stream_options" not in sent(result)
    assert prepared(server=server, stream=True, stream_options=5).upstream_stream


def test_backend_gets_its_own_name_for_the_model() -> None:
    server = backend(model="public", served_model="private")
    result = prepare(Body.read("chat", b'{"model":"public","messages":[]}'), MODEL, server, seed=1)
    assert sent(result)["model"] == result.served_model == "private"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        {"structured_outputs": {"choice": ["a"]}},
        {"guided_regex": "a+"},
        {"tools": [{}], "tool_choice": "required"},
        {"tools": [{}], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [{"function": {"name": "f", "strict": True}}]},
        {"tools": [{}], "parallel_tool_calls": False},
    ],
)
def test_grammar(fields: dict[str, Any]) -> None:
    assert prepared(**fields).sampling.grammar


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"tools": [{}], "tool_choice": "auto"},
        {"tools": [{}], "parallel_tool_calls": True},
        {"tools": [{"function": {"name": "f", "strict": True}}], "tool_choice": "none"},
        {"tools": [], "parallel_tool_calls": False},
        {"parallel_tool_calls": False},
        {"structured_outputs": None},
    ],
)
def test_no_grammar(fields: dict[str, Any]) -> None:
    assert not prepared(**fields).sampling.grammar


@pytest.mark.parametrize(
    ("declared", "fields", "grammar"),
    [
        ("tools", {}, False),
        ("tools", {"tools": [{}]}, True),
        ("tools", {"tools": [{}], "tool_choice": "none"}, True),
        ("always", {}, True),
    ],
)
def test_grammars_that_servers_bind_of_themselves(declared: str, fields: dict[str, Any], grammar: bool) -> None:
    body = json.dumps({"model": "m", "messages": [], **fields}).encode()
    result = prepare(Body.read("chat", body), model(grammar=declared), BACKEND, seed=1)
    assert result.sampling.grammar is grammar
    text = json.dumps({"model": "m", "prompt": "x", **fields}).encode()
    assert not prepare(Body.read("completions", text), model(grammar=declared), BACKEND, seed=1).sampling.grammar


@pytest.mark.parametrize(
    ("prompt", "count"), [("a", 1), ([1, 2, 3], 1), (["a", "b"], 2), ([[1], [2], [3]], 3), ([], 1), (None, 1)]
)
def test_prompts_are_counted(prompt: Any, count: int) -> None:
    assert prepared("completions", prompt=prompt, n=2).prompts == count
    assert prepared("completions", prompt=prompt, n=2).n == 2


def test_sampling_as_vllm_resolves_it() -> None:
    greedy = prepared(temperature=0, top_p=0.5, top_k=3, min_p=0.1).sampling
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.min_p) == (0.0, 1.0, 0, 0.0)
    assert prepared(temperature=0.001).sampling.temperature == 0.01
    rest = prepared(
        stop="x", stop_token_ids=[1, "2"], logit_bias={"5": 1, "x": 2}, bad_words=["w"], min_tokens=2, ignore_eos=True
    ).sampling
    assert rest.stop == ("x",)
    assert rest.stop_token_ids == (1, 2)
    assert rest.logit_bias == ((5, 1.0),)
    assert rest.bad_words == ("w",)
    assert rest.min_tokens == 2
    assert rest.ignore_eos


def test_hidden_reasoning_is_still_asked_for() -> None:
    result = prepared(include_reasoning=False)
    assert sent(result)["include_reasoning"] is True
    assert not result.asked.reasoning
    assert sent(prepared(include_reasoning=None))["include_reasoning"] is None
