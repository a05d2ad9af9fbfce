"""What a request is taken to cost before it is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policies.limits import NOTHING, Cost
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
    assert 500 < found.likely < 520
    assert 500 < found.most < 550


def test_only_what_answers_has_an_answer() -> None:
    assert not _cost("/v1/embeddings", input="x").open
    assert _cost("/v1/responses", input="x").open
    assert _cost("chat", messages=[]).open
    assert _cost("completions", prompt="x").likely == 1 + 16
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
    assert 8000 < found.most < 8400


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


def test_the_models_length() -> None:
    assert _cost("chat", 1000, messages=[]) == Cost(1000, 1000, 1, open=True, cap=2000)
    assert _cost("chat", 1000, messages=_says({"type": "text", "text": "x" * 90_000}), max_tokens=10).most == 1000
