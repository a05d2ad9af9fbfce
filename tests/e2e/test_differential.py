"""The same request to a real vLLM, as it is and as the proxy sends it: the client must not see a difference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from policies.evidence import Endpoint
from policies.settings import BackendSettings, ModelSettings
from proxy.relay.body import Body
from proxy.tap import TokenStrings, open_tap, prepare
from proxy.tap.types import Tap
from tests.e2e.ahead import Ahead, ahead
from tests.proxy.tap.compare import assert_same, text

pytestmark = pytest.mark.e2e

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
EMOJI = "Repeat exactly: 😀🎉 héllo 日本語 🌟"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TOOLS = {"max_tokens": 32, "tools": [WEATHER], "messages": [{"role": "user", "content": "Weather in Paris?"}]}
SAMPLED = {"temperature": 0.8, "seed": 7}
ATTEMPTS = 10
"""The server may batch another request with ours, which changes the last bits of logits."""

EITHER: dict[str, dict[str, Any]] = {
    "plain": {},
    "limit 1": {"max_tokens": 1},
    "stop": {"stop": ["a", "1"]},
    "stop kept": {"stop": ["a", "1"], "include_stop_str_in_output": True},
    "usage": {"stream_options": {"include_usage": True}},
    "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "continuous without usage": {"stream_options": {"continuous_usage_stats": True}},
    "own ids": {"return_token_ids": True},
    "sampled": SAMPLED,
    "two choices": {**SAMPLED, "n": 2},
    "interval": {"stream_interval": 4},
    "unknown": {"x_unknown": {"a": [1]}, "user": "u"},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 6, "logit_bias": {"2": 5}},
}
CHAT: dict[str, dict[str, Any]] = {
    **EITHER,
    "logprobs 0": {"logprobs": True},
    "logprobs 5": {"logprobs": True, "top_logprobs": 5},
    "logprobs 20": {"logprobs": True, "top_logprobs": 20},
    "logprobs as ids": {"logprobs": True, "top_logprobs": 3, "return_tokens_as_token_ids": True},
    "logprobs of two choices": {**SAMPLED, "n": 2, "logprobs": True, "top_logprobs": 2},
    "tools auto": {**TOOLS, "tool_choice": "auto"},
    "tools required": {**TOOLS, "tool_choice": "required"},
    "tools named": {**TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    "schema": {"response_format": {"type": "json_object"}, "max_tokens": 8},
    "prompt text": {"return_prompt_text": True},
    "hidden reasoning": {"include_reasoning": False},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    **EITHER,
    "logprobs 0": {"logprobs": 0},
    "logprobs 5": {"logprobs": 5},
    "logprobs 20": {"logprobs": 20},
    "logprobs as ids": {"logprobs": 3, "return_tokens_as_token_ids": True},
    "two prompts": {"prompt": ["One two", "Red green 😀"]},
    "prompt of ids": {"prompt": [504, 6376, 18234], "logprobs": 2},
    "default limit": {"max_tokens": None},
}
REFUSED: list[tuple[Endpoint, dict[str, Any]]] = [
    ("chat", {"top_logprobs": 3}),
    ("chat", {"logprobs": True, "top_logprobs": 21}),
    ("chat", {"logprobs": True, "top_logprobs": -2}),
    ("chat", {"stream_options": {"include_usage": True}}),
    ("chat", {"stream": True, "stream_options": {"include_usage": "perhaps"}}),
    ("chat", {"n": 2}),
    ("chat", {"temperature": 3}),
    ("chat", {"temperature": "warm"}),
    ("chat", {"seed": 2**63}),
    ("chat", {"max_tokens": 0}),
    ("chat", {"max_tokens": 10_000_000}),
    ("chat", {"return_token_ids": "perhaps"}),
    ("chat", {"messages": "none"}),
    ("chat", {"tools": []}),
    ("chat", {"tool_choice": "required"}),
    ("chat", {"include_reasoning": None}),
    ("completions", {"logprobs": 21}),
    ("completions", {"logprobs": "5"}),
    ("completions", {"prompt": []}),
    ("completions", {"prompt": [10_000_000]}),
    ("completions", {"max_tokens": 0}),
    ("completions", {"n": None}),
]


class Server:
    """A real vLLM, and the settings the proxy would have for it."""

    def __init__(self, url: str, model_dir: Path) -> None:
        # A connection that waited its turn may be the one that the server is closing.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.client = httpx.Client(base_url=url, timeout=120, trust_env=False, limits=limits)
        self.model: str = self.client.get("/v1/models").json()["data"][0]["id"]
        self.strings = TokenStrings.load(model_dir)
        config = model_dir / "generation_config.json"
        declared = json.loads(config.read_text()) if config.exists() else {}
        self.settings = ModelSettings.model_validate({"tokenizer": str(model_dir), "generation_config": declared})
        self.backend = BackendSettings.model_validate({"name": "b", "url": url, "model": self.model})

    def body(self, endpoint: Endpoint, fields: dict[str, Any]) -> bytes:
        base: dict[str, Any] = {"model": self.model, "temperature": 0, "max_tokens": 12}
        base |= {"prompt": EMOJI} if endpoint == "completions" else {"messages": [{"role": "user", "content": EMOJI}]}
        return json.dumps(base | fields).encode()

    def plain(self, endpoint: Endpoint, body: bytes) -> httpx.Response:
        return self.client.post(PATHS[endpoint], content=body, headers={"content-type": "application/json"})

    def tapped(self, endpoint: Endpoint, body: bytes) -> tuple[int, bytes, Tap]:
        request = prepare(Body.read(endpoint, body), self.settings, self.backend, seed=123)
        with self.client.stream(
            "POST", PATHS[endpoint], content=request.body, headers={"content-type": "application/json"}
        ) as response:
            tap = open_tap(
                request,
                self.model,
                tokenizer=self.strings,
                status=response.status_code,
                content_type=response.headers.get("content-type"),
            )
            shown = b"".join([tap.feed(part) for part in response.iter_raw()])
        return response.status_code, shown + tap.close() + tap.done, tap


@pytest.fixture(scope="module")
def server(vllm_server: str, model_dir: str | Path) -> Iterator[Server]:
    found = Server(vllm_server, Path(model_dir))
    yield found
    found.client.close()


def compare(server: Server, endpoint: Endpoint, fields: dict[str, Any], *, stream: bool) -> Tap:
    body = server.body(endpoint, {**fields, "stream": stream})
    for attempt in range(ATTEMPTS):
        plain = server.plain(endpoint, body)
        status, shown, tap = server.tapped(endpoint, body)
        assert status == plain.status_code
        if status != 200:
            assert shown == plain.content
            return tap
        try:
            assert_same(plain.content, shown, stream=stream)
        except AssertionError:
            if attempt == ATTEMPTS - 1:
                raise
        else:
            return tap
    raise AssertionError("unreachable")


@pytest.fixture(scope="module")
def compared(server: Server, request: pytest.FixtureRequest) -> Iterator[Ahead[Tap]]:
    def work(endpoint: Endpoint, name: str, stream: bool) -> Tap:
        fields = dict((CHAT if endpoint == "chat" else COMPLETIONS)[name])
        if not stream:
            fields.pop("stream_options", None)
        return compare(server, endpoint, fields, stream=stream)

    with ahead(request, "test_answers_are_the_same", work) as found:
        yield found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("endpoint", "name"), [*(("chat", name) for name in CHAT), *(("completions", name) for name in COMPLETIONS)]
)
def test_answers_are_the_same(
    compared: Ahead[Tap], request: pytest.FixtureRequest, endpoint: Endpoint, name: str, stream: bool
) -> None:
    tap = compared.of(request.node)
    for evidence in tap.evidence():
        if "upstream_error" in evidence.faults:
            continue  # the server was started without what the request needs, and said so to both
        assert evidence.faults == ()
        assert evidence.complete
        assert evidence.claim_ids.shape == (len(evidence.output_ids), 21)
        assert (evidence.claim_ids[:, 0] == evidence.output_ids).all()


@pytest.mark.parametrize(("endpoint", "fields"), REFUSED)
def test_what_vllm_refuses_stays_refused(server: Server, endpoint: Endpoint, fields: dict[str, Any]) -> None:
    body = server.body(endpoint, fields)
    plain = server.plain(endpoint, body)
    status, shown, tap = server.tapped(endpoint, body)
    assert plain.status_code == status >= 400
    assert json.loads(shown)["error"]["code"] == json.loads(plain.content)["error"]["code"]
    assert "upstream_error" in tap.evidence()[0].faults


def test_text_is_the_tokens_text(server: Server) -> None:
    """The stream's text, the whole answer's text and the evidence's text agree."""
    body = server.body("chat", {"stream": True})
    _, shown, tap = server.tapped("chat", body)
    assert text(shown, stream=True)[0] == tap.evidence()[0].text
