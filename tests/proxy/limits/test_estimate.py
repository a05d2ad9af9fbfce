"""What a request is taken to cost before it is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policies.limits import ASSUMED_LENGTH, NOTHING, Cost
from policies.settings import ModelSettings
from proxy.limits.estimate import cost_of
from proxy.relay.body import Body

DATA = "data:image/png;base64," + "A" * 100_000


def _cost(endpoint: str, context: int | None = None, **fields: Any) -> Cost:
    body = Body.read(endpoint, json.dumps({"model": "m", **fields}).encode())
    return cost_of(body, ModelSettings(max_model_len=context))


def _says(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [
        ("chat", "max_tokens"),
        ("chat", "max_completion_tokens"),
        ("completions", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
    ],
)
def test_each_endpoint_has_its_word_for_the_length(endpoint: str, name: str) -> None:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], name: 500}
    found = _cost(endpoint, **fields)
    assert not found.open
    assert 500 < found.likely < 530
    assert 500 < found.most < 600


def test_only_what_answers_has_an_answer() -> None:
    assert not _cost("/v1/embeddings", input="x").open
    assert _cost("/v1/responses", input="x").open
    assert _cost("chat", messages=[]).open
    assert _cost("completions", prompt="x").likely == 8 + 16
    for endpoint in ("/tokenize", "/detokenize", "/v1/messages/count_tokens"):
        assert _cost(endpoint, prompt="x" * 1000) == NOTHING


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": DATA}},
        {"type": "input_image", "image_url": DATA},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
        {"type": "tool_result", "content": [{"type": "image", "source": {"data": DATA}}]},
        {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}},
    ],
)
def test_images_are_no_text(part: dict[str, Any]) -> None:
    found = _cost("chat", messages=_says(part, {"type": "text", "text": "x" * 4000}), max_tokens=0)
    assert 2000 < found.likely < 2200
    assert found.most < 4000 + ASSUMED_LENGTH + 400
    assert not found.known
    assert _cost("chat", 5000, messages=_says(part), max_tokens=0).most == 5000


def test_text_in_parts_is_text() -> None:
    for kind in ("text", "tool_result", "input_text", "imag"):
        found = _cost("chat", messages=_says({"type": kind, "text": "x" * 4000}), max_tokens=0)
        assert found.most > 4000


def test_whatever_stands_there_is_counted() -> None:
    for fields in ({"messages": 5}, {"messages": [5, [], {"content": 5}]}, {"input": {"a": 1}}, {"query": "x" * 99}):
        found = _cost("/v1/rerank", **fields)
        assert found.most > 0
    assert _cost("/v1/rerank", query="x" * 4000).likely >= 1000


def test_tools_and_instructions_are_part_of_the_prompt() -> None:
    plain = _cost("chat", messages=[], max_tokens=1)
    more = _cost("chat", messages=[], max_tokens=1, tools=[{"x": "y" * 400}])
    assert more.likely >= plain.likely + 100


LONG = "x" * 4000


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("chat", {"messages": [], "chat_template_kwargs": {"date_string": LONG}}),
        ("chat", {"messages": [], "reasoning_effort": LONG}),
        ("chat", {"messages": [{"role": "user", "type": "image", "content": LONG}]}),
        ("chat", {"messages": [{"role": "user", "type": "image", "url": LONG}]}),
        ("chat", {"messages": [{"role": "tool", "type": "file", "content": "", "reasoning": {"data": LONG}}]}),
        ("chat", {"messages": _says({"role": "user", "type": "image", "content": LONG})}),
        ("chat", {"messages": _says({"type": "image", "image_url": {"url": DATA}, "text": LONG})}),
        ("chat", {"messages": _says({"type": "document", "source": {"type": "text", "data": LONG}})}),
        ("chat", {"messages": _says({"type": "document", "source": {"content": [{"text": LONG}]}})}),
        ("completions", {"prompt": "x", "suffix": LONG}),
        ("/v1/responses", {"input": "x", "text": {"format": {"description": LONG}}}),
        ("/v1/responses", {"input": [{"type": "image", "role": "user", "content": LONG}]}),
        ("/v1/messages", {"messages": [], "thinking": {"x": LONG}}),
        ("/v1/other", {"whatever": LONG}),
    ],
)
def test_whatever_a_prompt_may_hold_is_held(endpoint: str, fields: dict[str, Any]) -> None:
    found = _cost(endpoint, **fields, max_tokens=1, max_output_tokens=1)
    assert found.most > 4000
    assert found.least > 1000


def test_what_no_prompt_holds_costs_nothing() -> None:
    outside: dict[str, Any] = {"logit_bias": {"1": 5}, "stop": [LONG], "bad_words": [LONG], "metadata": {"a": LONG}}
    assert _cost("chat", messages=[], max_tokens=1, **outside).most < 300


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": {"id": "c"}},
        {"prompt": {"id": "p"}},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "mcp", "server_url": "x"}, {"type": "function", "name": "f"}]},
    ],
)
def test_what_only_the_backend_has_is_unknown(fields: dict[str, Any]) -> None:
    found = _cost("/v1/responses", input="x", max_output_tokens=1, **fields)
    assert not found.known
    assert found.most > ASSUMED_LENGTH
    assert _cost("/v1/responses", 5000, input="x", max_output_tokens=1, **fields).most == 5000
    unset: dict[str, Any] = dict.fromkeys(fields)
    assert _cost("/v1/responses", input="x", max_output_tokens=1, **unset).known
    assert _cost("/v1/responses", input="x", max_output_tokens=1, tools=[{"type": "function", "name": "f"}]).known


def test_a_query_is_read_with_each_document() -> None:
    documents = ["x"] * 100
    assert _cost("/v1/rerank", query="q" * 500, documents=documents).most > 100 * 500
    assert _cost("/v1/score", text_1=["q" * 500], text_2=documents).most > 100 * 500
    assert _cost("/v1/embeddings", input=documents).most < 1000
    assert _cost("/v1/rerank", 512, query="q" * 500, documents=documents).most > 100 * 500


def test_a_template_may_say_more_than_the_request() -> None:
    body = Body.read("chat", json.dumps({"model": "m", "messages": [], "max_tokens": 1}).encode())
    declared = [cost_of(body, ModelSettings(template_tokens=tokens)) for tokens in (0, 900)]
    assert declared[1].most - declared[0].most == 900
    assert declared[1].taken(800, 1) == 801
    assert declared[0].taken(800, 1) == len(body.data) + 1


def test_the_models_length() -> None:
    assert _cost("chat", 1000, messages=[]) == Cost(1000, 1000, 8, open=True)
    assert _cost("chat", 1000, messages=_says({"type": "text", "text": "x" * 90_000}), max_tokens=10).most == 1000
