"""A vLLM server as the reference, over HTTP. Slow: it is the session's real server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from policies.settings import ReferenceSettings
from verifier_pool.reference import open_reference
from verifier_pool.reference.base import Reference, ReplayRequest

pytestmark = pytest.mark.e2e

ASK = {"model": "smollm2", "temperature": 0, "max_tokens": 20, "return_token_ids": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Describe a kite, ünïcode and all."}]}


@pytest.fixture(scope="module")
def reference(vllm_server: str) -> Iterator[Reference]:
    settings = ReferenceSettings(kind="vllm_http", url=vllm_server, served_model="smollm2", timeout=120)
    opened = open_reference("smollm2", settings)
    yield opened
    opened.close()


def test_a_replay_agrees_with_what_the_server_said_of_its_own_answer(vllm_server: str, reference: Reference) -> None:
    body = {**ASK, **CHAT, "logprobs": True, "top_logprobs": 20}
    answer = httpx.post(vllm_server + "/v1/chat/completions", json=body, timeout=120, trust_env=False).json()
    choice = answer["choices"][0]
    request = ReplayRequest(
        np.asarray(answer["prompt_token_ids"], np.int32),
        np.asarray(choice["token_ids"], np.int32),
        "chat",
        orjson.dumps(body),
    )
    (replay,) = reference.replay([request])
    assert replay.prompt_ids is not None
    assert replay.prompt_ids.tolist() == answer["prompt_token_ids"]
    assert replay.ids[:, 0].tolist() == choice["token_ids"]
    claimed = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert np.abs(replay.logprobs[:, 0] - np.asarray(claimed)).mean() < 0.1
    assert reference.name.startswith("vllm_http vllm-0.32")


def test_completions_are_rendered_prompt_by_prompt(vllm_server: str, reference: Reference) -> None:
    body = {**ASK, "prompt": ["The lighthouse", "Two red clocks"], "max_tokens": 4}
    answer = httpx.post(vllm_server + "/v1/completions", json=body, timeout=120, trust_env=False).json()
    requests = [
        ReplayRequest(
            np.asarray(choice["prompt_token_ids"], np.int32),
            np.asarray(choice["token_ids"], np.int32),
            "completions",
            orjson.dumps(body),
            choice["index"],
        )
        for choice in answer["choices"]
    ]
    replays = reference.replay(requests)
    for request, replay in zip(requests, replays, strict=True):
        assert replay.prompt_ids is not None
        assert np.array_equal(replay.prompt_ids, request.prompt_ids)


def test_its_canaries(reference: Reference) -> None:
    canary = reference.canary
    assert canary is not None
    assert not canary.due(0)
    end = time.monotonic() + 120
    while not canary.known:
        assert time.monotonic() < end
        time.sleep(0.05)
    for turn in range(1, 5):
        assert canary.due(1000.0 * turn)
        assert canary.judge(reference.replay(canary.requests()))
