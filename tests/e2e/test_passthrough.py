"""Endpoints that are relayed unverified, in front of a real vLLM: the client's view is the backend's own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from policies.settings import Settings
from tests.support.running import RunningProxy

pytestmark = pytest.mark.e2e

GREEDY = {"model": "smollm2", "temperature": 0}
SAY = [{"role": "user", "content": "Say hi."}]
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "responses": ("/v1/responses", {**GREEDY, "input": "Say hi.", "max_output_tokens": 8}),
    "responses-items": ("/v1/responses", {**GREEDY, "input": SAY, "instructions": "Be brief.", "max_output_tokens": 8}),
    "messages": ("/v1/messages", {**GREEDY, "messages": SAY, "max_tokens": 8, "system": "Be brief."}),
    "messages-tools": ("/v1/messages", {**GREEDY, "messages": SAY, "max_tokens": 8, "tools": [TOOL]}),
}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    **CASES,
    "count-tokens": ("/v1/messages/count_tokens", {"model": "smollm2", "messages": SAY}),
    "embeddings": ("/v1/embeddings", {"model": "smollm2", "input": "Say hi."}),
    "tokenize": ("/tokenize", {"model": "smollm2", "prompt": "Zürich 🎉", "return_token_strs": True}),
    "tokenize-chat": ("/tokenize", {"model": "smollm2", "messages": SAY}),
    "detokenize": ("/detokenize", {"model": "smollm2", "tokens": [504, 6376]}),
    "refused": ("/v1/messages", {"model": "smollm2", "messages": SAY}),
    "refused-responses": ("/v1/responses", {**GREEDY, "input": "Say hi.", "max_output_tokens": -1}),
}
_CHANCE = re.compile(r'"(id|item_id|created_at|completed_at|created|sequence_number)":("[^"]*"|[\d.]+)')


@pytest.fixture(scope="module")
def proxied(vllm_server: str, valkey: str) -> Iterator[httpx.Client]:
    backend = {"name": "b1", "url": vllm_server, "model": "smollm2"}
    settings = Settings.model_validate({"models": {"smollm2": {}}, "backends": [backend]})
    with RunningProxy(settings, valkey) as proxy, httpx.Client(base_url=proxy.url, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def direct(vllm_server: str) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=vllm_server, timeout=300, trust_env=False, limits=limits) as client:
        yield client


def settled(body: str) -> str:
    """The body without its ids and times."""
    return _CHANCE.sub(r'"\1":0', body)


def events(body: str) -> list[tuple[str, Any]]:
    """Name and data of each event of a stream; runs of text deltas as one, because tokens come in any groups."""
    found: list[tuple[str, Any]] = []
    for event in settled(body).strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.split("\n"))
        data = json.loads(lines["data"]) if lines["data"] != "[DONE]" else {}
        name, text = lines.get("event", ""), _text(data)
        if text is not None and found and found[-1][0] == name and isinstance(found[-1][1], str):
            found[-1] = name, found[-1][1] + text
        else:
            found.append((name, data if text is None else text))
    return found


def _text(data: dict[str, Any]) -> str | None:
    delta = data.get("delta")
    if isinstance(delta, dict):
        delta = delta.get("text")
    return delta if isinstance(delta, str) else None


def on_record(proxied: httpx.Client, response: httpx.Response) -> tuple[str, list[str]]:
    id = response.headers["x-countersign-id"]
    document = proxied.get(f"/v1/verifications/{id}", params={"wait": 10}).json()
    return document["verdict"], document["reasons"]


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_answer_is_the_backends_own(proxied: httpx.Client, direct: httpx.Client, name: str) -> None:
    path, body = WHOLE[name]
    plain, shown = direct.post(path, json=body), proxied.post(path, json=body)
    assert (shown.status_code, settled(shown.text)) == (plain.status_code, settled(plain.text))
    assert shown.headers["content-type"] == plain.headers["content-type"]
    reason = "endpoint" if plain.status_code == 200 else "client_error"
    assert on_record(proxied, shown) == ("unverified", [reason])


@pytest.mark.parametrize("name", CASES)
def test_a_stream_is_the_backends_own(proxied: httpx.Client, direct: httpx.Client, name: str) -> None:
    path, body = CASES[name]
    plain, shown = (client.post(path, json={**body, "stream": True}) for client in (direct, proxied))
    assert plain.status_code == shown.status_code == 200
    assert len(events(plain.text)) > 3
    assert events(shown.text) == events(plain.text)
    assert shown.headers["content-type"] == plain.headers["content-type"]
    assert on_record(proxied, shown) == ("unverified", ["endpoint"])
