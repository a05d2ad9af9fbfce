"""An honest backend on a socket, made of the toy model: it draws as vLLM 0.32 does, and spells answers as it does."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from policies import noise
from tests.support.fake_backend import Close, Received, Step
from tests.support.wire import LAST_CHUNK, SSE_HEAD, chunk, whole
from tests.verifier_pool.toy import VOCAB, logprobs_after, rows

RUNTIME = "vllm-0.32-v2"
ENGINE = "vLLM 0.32.0, toy"

Change = Callable[[dict[str, Any], int], "list[Step] | None"]
"""From the request's fields and how many came before it to another reply, or None for the honest one."""


class ToyServer:
    """A script for FakeBackend. `kernels` and `salt` as in the toy; `change` may answer otherwise."""

    def __init__(
        self, *, kernels: int = 1, salt: int = 0, version: str | None = "0.32.0", change: Change | None = None
    ) -> None:
        self.kernels = kernels
        self.salt = salt
        self.version = version
        self.change = change
        self.asked: list[dict[str, Any]] = []

    def __call__(self, request: Received) -> list[Step]:
        if request.line.startswith(b"GET /version"):
            body = json.dumps({"version": self.version}).encode()
            return [whole(body) if self.version is not None else whole(b"{}", 404)]
        fields = json.loads(request.body)
        self.asked.append(fields)
        if self.change is not None and (other := self.change(fields, len(self.asked) - 1)) is not None:
            return other
        return self.reply(fields)

    def reply(self, fields: dict[str, Any]) -> list[Step]:
        """The honest answer."""
        prompt = prompt_ids(fields)
        tokens = self._draw(fields, prompt)
        ids, logprobs = rows([prompt[-1], *tokens[:-1]], np.asarray(tokens, np.int32), self.salt, self.kernels)
        content = [_entry(*pair) for pair in zip(ids.tolist(), logprobs.tolist(), strict=True)]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        usage["total_tokens"] = sum(usage.values())
        head = {"id": "chatcmpl-1", "created": 1, "model": "toy", "prompt_token_ids": prompt}
        choice = {"index": 0, "logprobs": {"content": content}, "token_ids": tokens, "finish_reason": "length"}
        if not fields.get("stream"):
            message = {"role": "assistant", "content": "toy"}
            top = {**head, "object": "chat.completion", "choices": [{**choice, "message": message}], "usage": usage}
            return [whole(json.dumps(top).encode())]
        kind = "chat.completion.chunk"
        delta = {"role": "assistant", "content": "toy"}
        frames = [
            {**head, "object": kind, "choices": [{**choice, "delta": delta}]},
            {**head, "object": kind, "choices": [], "usage": usage},
        ]
        data = [b"data: " + json.dumps(frame).encode() + b"\n\n" for frame in frames]
        return [SSE_HEAD, *(chunk(frame) for frame in (*data, b"data: [DONE]\n\n")), LAST_CHUNK]

    def _draw(self, fields: dict[str, Any], prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        every = np.arange(VOCAB, dtype=np.int32)[None]
        for place in range(fields["max_tokens"]):
            scores = _logprobs((tokens or prompt)[-1], self.salt, self.kernels)
            if fields["temperature"] > 0:
                gumbel = noise.gumbel(RUNTIME, fields["seed"], len(prompt) + place, every)
                assert gumbel is not None
                scores = scores + fields["temperature"] * gumbel[0]
            tokens.append(int(scores.argmax()))
        return tokens


_logprobs = lru_cache(logprobs_after)


def prompt_ids(fields: dict[str, Any]) -> list[int]:
    """The toy's chat template: a few ids that depend on every message."""
    text = json.dumps(fields["messages"])
    return [int(byte) % VOCAB for byte in np.random.default_rng(list(text.encode())).integers(0, VOCAB, 6)]


def failing(times: int, status: int = 500) -> Change:
    """The first few requests fail."""
    return lambda fields, before: [whole(b"{}", status)] if before < times else None


def hanging_up(times: int) -> Change:
    """The first few answers break off."""
    return lambda fields, before: [SSE_HEAD, Close()] if before < times else None


def configuration(folder: Path, *urls: str, **changes: Any) -> Path:
    """Settings with a trusted backend b1, b2, … per URL; `changes` apply to the last."""
    backends: list[dict[str, Any]] = [
        {"name": f"b{number}", "url": url, "model": "toy", "runtime": RUNTIME, "precision": "bf16", "engine": ENGINE}
        for number, url in enumerate(urls, 1)
    ]
    backends = [backend | {"trusted": True} for backend in backends]
    backends[-1] |= changes
    reference = {"kind": "vllm_http", "url": "http://127.0.0.1:1"}
    model = {"vocab_size": VOCAB, "max_model_len": 4096, "reference": reference}
    path = folder / "countersign.yaml"
    path.write_text(yaml.safe_dump({"models": {"toy": model}, "backends": backends}))
    return path


def _entry(ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    listed = [
        {"token": f"token_id:{id}", "logprob": logprob, "bytes": None}
        for id, logprob in sorted(zip(ids, logprobs, strict=True), key=lambda pair: -pair[1])
        if id >= 0
    ][:20]
    return {"token": f"token_id:{ids[0]}", "logprob": logprobs[0], "bytes": None, "top_logprobs": listed}
