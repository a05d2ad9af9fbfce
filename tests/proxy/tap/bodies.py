"""Requests, chunks and bodies as vLLM 0.32 writes them, made by hand."""

from __future__ import annotations

import json
from typing import Any

from policies.evidence import Endpoint
from policies.settings import BackendSettings, BoundsSettings, ModelSettings
from proxy.relay.body import Body
from proxy.tap import TokenStrings, open_tap, prepare
from proxy.tap.types import Prepared, Tap


def model(**fields: Any) -> ModelSettings:
    """Settings of a model."""
    return ModelSettings.model_validate(fields)


def backend(**fields: Any) -> BackendSettings:
    """Settings of a backend."""
    return BackendSettings.model_validate({"name": "b", "url": "http://b", "model": "m", **fields})


BOUNDS = BoundsSettings()
MODEL = model(tokenizer="tokenizer.json")
BACKEND = backend()
HEAD: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
DONE = b"data: [DONE]\n\n"
HIDDEN = {"logprobs": None, "token_ids": None}
USAGE = {"prompt_tokens": 2, "total_tokens": 4, "completion_tokens": 2}


def prepared(endpoint: Endpoint = "chat", *, server: BackendSettings = BACKEND, **fields: Any) -> Prepared:
    """A small request, prepared."""
    base: dict[str, Any] = {"model": "m"}
    base |= {"messages": [{"role": "user", "content": "hi"}]} if endpoint == "chat" else {"prompt": "hi"}
    return prepare(Body.read(endpoint, json.dumps(base | fields).encode()), MODEL, server, seed=100)


def stream_tap(
    endpoint: Endpoint = "chat",
    *,
    tokenizer: TokenStrings | None = None,
    bounds: BoundsSettings = BOUNDS,
    **fields: Any,
) -> Tap:
    """The tap of a streamed request."""
    request = prepared(endpoint, stream=True, **fields)
    return open_tap(request, "m", tokenizer=tokenizer, content_type="text/event-stream", bounds=bounds)


def whole_tap(endpoint: Endpoint = "chat", **fields: Any) -> Tap:
    """The tap of a request that is not streamed."""
    return open_tap(prepared(endpoint, **fields), "m", content_type="application/json")


def entry(id: int, logprob: float = -0.5, others: int = 20) -> dict[str, Any]:
    """Logprobs of one position: the sampled token, and `others` tokens in all."""
    top = [{"token": f"token_id:{id}", "logprob": logprob, "bytes": [65]}]
    top += [{"token": f"token_id:{1000 + k}", "logprob": -5.0 - k, "bytes": [65]} for k in range(others - 1)]
    return {"token": f"token_id:{id}", "logprob": logprob, "bytes": [65], "top_logprobs": top}


def choice(index: int = 0, content: str | None = "a", ids: tuple[int, ...] = (7,), **fields: Any) -> dict[str, Any]:
    """A choice of a chunk with content."""
    return {
        "index": index,
        "delta": {} if content is None else {"content": content},
        "logprobs": {"content": [entry(id) for id in ids]},
        "finish_reason": None,
        "token_ids": list(ids),
        **fields,
    }


def chunk(*choices: dict[str, Any], **fields: Any) -> bytes:
    """One event."""
    return sse({**HEAD, "choices": list(choices), **fields})


def opening(index: int = 0) -> bytes:
    """The role chunk."""
    first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return chunk(first, prompt_token_ids=[1, 2], prompt_text=None)


def ending(index: int = 0, ids: tuple[int, ...] = (8,), reason: str = "stop", **fields: Any) -> bytes:
    """The terminal chunk of a choice."""
    return chunk(choice(index, None, ids, finish_reason=reason, stop_reason=None) | fields)


def usage_chunk(**fields: Any) -> bytes:
    """The usage chunk."""
    return sse({**HEAD, "choices": [], "usage": USAGE, "system_fingerprint": "vllm-x", **fields})


def sse(value: Any) -> bytes:
    """An event with a JSON value."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def stream() -> bytes:
    """A whole stream with our additions."""
    return opening() + chunk(choice()) + ending() + usage_chunk() + DONE


def plain() -> bytes:
    """What vLLM sends of `stream()` without our additions."""
    last = choice(0, None, (8,), finish_reason="stop", stop_reason=None) | HIDDEN
    return (
        opening().replace(b"[1,2]", b"null")
        + chunk(choice() | HIDDEN)
        + chunk(last, system_fingerprint="vllm-x")
        + DONE
    )


def body(*choices: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A whole chat answer."""
    default = {
        "index": 0,
        "message": {"role": "assistant", "content": "a", "refusal": None, "reasoning": None},
        "logprobs": {"content": [entry(7), entry(8)]},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": [7, 8],
        "routed_experts": None,
    }
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": list(choices) or [default],
        "system_fingerprint": "vllm-x",
        "usage": USAGE,
        "prompt_token_ids": [1, 2],
        **fields,
    }


def run(tap: Tap, data: bytes, *, fault: str | None = None) -> bytes:
    """Everything the client gets."""
    return tap.feed(data) + tap.close(fault) + tap.done
