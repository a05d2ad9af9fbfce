"""What a real vLLM shows is what its ids spell, and its answers end as their hazard says, in every form of request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from policies import structure
from policies.checks import Result
from policies.evidence import Evidence
from policies.settings import BackendSettings, ModelSettings
from proxy.relay.body import Body
from proxy.tap import TokenStrings, open_tap, prepare
from tests.e2e.ahead import Ahead, ahead
from verifier_pool.tokenizer import TokenizerSpelling

pytestmark = pytest.mark.e2e

EOS = 2
LIMITS: dict[str, Any] = {"vocab_size": 49_152, "max_model_len": 2048, "eos_token_ids": (EOS,)}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
EMOJI = [260, 198, 240, 159, 142, 137]


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


CHAT: dict[str, dict[str, Any]] = {
    "plain": {"messages": say("Say hello in English, Chinese, Japanese, Arabic and Greek.")},
    "emoji": {"messages": say("Answer only with emoji: a birthday party 🎉👩‍👩‍👧"), "temperature": 1.3},
    "code": {"messages": say("Write a Python function with tabs and a docstring."), "temperature": 0.7},
    "hot": {"messages": say("Invent words."), "temperature": 1.9},
    "greedy": {"messages": say("Count to ten."), "temperature": 0},
    "several": {"messages": say("A short greeting."), "n": 3},
    "stop": {"messages": say("Count: one, two, three, four, five, six"), "stop": ["ve", "thr", ", s"]},
    "stop-shown": {"messages": say("Count from 1 to 30."), "stop": ["7", "1"], "include_stop_str_in_output": True},
    "stop-late": {"messages": say("Count from 1 to 30."), "stop": ["1", " "], "min_tokens": 12},
    "stop-ids": {"messages": say("Tell me about cats."), "stop_token_ids": [30, 28, 284]},
    "specials": {"messages": say("Say hi."), "skip_special_tokens": False, "include_stop_str_in_output": True},
    "unspaced": {"messages": say("Say hi."), "skip_special_tokens": False, "spaces_between_special_tokens": False},
    "past-the-end": {"messages": say("Say hi."), "ignore_eos": True, "max_tokens": 40},
    "json": {"messages": say("A person as JSON."), "response_format": {"type": "json_object"}},
    "tools": {"messages": say("What is the weather in Zürich?"), "tools": [WEATHER]},
    "tools-required": {"messages": say("Weather in Zürich?"), "tools": [WEATHER], "tool_choice": "required"},
    "tools-named": {
        "messages": say("Weather in Zürich?"),
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    },
    "tools-none": {"messages": say("Weather in Zürich?"), "tools": [WEATHER], "tool_choice": "none"},
    "short": {"messages": say("🎉🎉🎉 repeat this"), "max_tokens": 3},
    "no-reasoning": {"messages": say("Say hi."), "include_reasoning": False},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "The 漢字 for mountain is"},
    "mid-word": {"prompt": "The philoso"},
    "mid-character": {"prompt": EMOJI[:-1], "temperature": 1.3},
    "several": {"prompt": ["Once upon", "def f(x):\n\t"], "n": 2},
    "stop": {"prompt": "1 2 3 4 5 6", "stop": [" 9", "\n"]},
    "hot": {"prompt": "zxq", "temperature": 1.9},
    "bytes": {"prompt": "x", "allowed_token_ids": list(range(17, 273)), "max_tokens": 40},
}
CASES = [(endpoint, name) for endpoint, all in (("chat", CHAT), ("completions", COMPLETIONS)) for name in all]


@pytest.fixture(scope="module")
def spelling(model_dir: Path) -> TokenizerSpelling:
    return TokenizerSpelling.load(model_dir)


@pytest.fixture(scope="module")
def client(vllm_server: str) -> Iterator[httpx.Client]:
    # A connection that waited its turn may be the one that the server is closing.
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=vllm_server, timeout=300, limits=limits) as client:
        yield client


def ask(client: httpx.Client, model_dir: Path, endpoint: Any, fields: dict[str, Any], seed: int) -> list[Evidence]:
    model = ModelSettings.model_validate({"tokenizer": str(model_dir)})
    backend = BackendSettings.model_validate({"name": "b", "url": "http://b", "model": "smollm2"})
    body = {"model": "smollm2", "max_tokens": 64, "temperature": 1.0, **fields}
    prepared = prepare(Body.read(endpoint, json.dumps(body).encode()), model, backend, seed=seed)
    path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
    answer = client.post(path, content=prepared.body, headers={"content-type": "application/json"})
    tap = open_tap(
        prepared,
        "smollm2",
        tokenizer=TokenStrings.load(model_dir),
        status=answer.status_code,
        content_type=answer.headers["content-type"],
    )
    tap.feed(answer.content)
    tap.close()
    assert answer.status_code == 200, answer.text
    return tap.evidence(id="0" * 32, model="smollm2")


@pytest.fixture(scope="module")
def answered(client: httpx.Client, model_dir: Path, request: pytest.FixtureRequest) -> Iterator[Ahead[list[Evidence]]]:
    def work(endpoint: Any, name: str, stream: bool) -> list[Evidence]:
        fields = (CHAT if endpoint == "chat" else COMPLETIONS)[name]
        return ask(client, model_dir, endpoint, {**fields, "stream": stream}, seed=len(name) * 7919 + 1)

    with ahead(request, "test_honest_answers_pass", work) as found:
        yield found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("endpoint", "name"), CASES, ids=lambda value: str(value))
def test_honest_answers_pass(
    answered: Ahead[list[Evidence]],
    request: pytest.FixtureRequest,
    spelling: TokenizerSpelling,
    endpoint: Any,
    name: str,
    stream: bool,
) -> None:
    for evidence in answered.of(request.node):
        check = structure.check(evidence, spelling=spelling, **LIMITS)
        assert check.result is Result.PASS, (check, evidence.text, evidence.finish_reason)
        assert check.metrics["text_compared"] == 1
        if evidence.text:
            assert_substitution_shows(evidence, spelling)


def assert_substitution_shows(evidence: Evidence, spelling: TokenizerSpelling) -> None:
    """A sentence put into the text never passes."""
    values = {name: getattr(evidence, name) for name in Evidence.__slots__}
    middle = len(evidence.text) // 2
    text = evidence.text[:middle] + "Buy Zyx!" + evidence.text[middle:]
    check = structure.check(Evidence(**{**values, "text": text}), spelling=spelling, **LIMITS)
    assert check.result in (Result.REJECT, Result.INCONCLUSIVE)
    if not evidence.tool_calls and b'"tools"' not in evidence.request:
        assert check.result is Result.REJECT
        assert "text_mismatch" in check.reason
