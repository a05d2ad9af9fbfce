"""Bytes a vLLM backend sends, as constants: three tokens of chat with ids and logprobs, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

TOKENS = ((11, "One"), (12, " two"), (13, " three"))
PROMPT_IDS = [1, 2, 3, 4]
DONE = b"data: [DONE]\n\n"


def head(status: int = 200, content_type: str = "application/json", *extra: str, reason: str = "X") -> bytes:
    """A response head; say `content-length` or `transfer-encoding` in `extra`."""
    rows = [f"HTTP/1.1 {status} {reason}", f"content-type: {content_type}", *extra]
    return ("\r\n".join(rows) + "\r\n\r\n").encode()


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


def whole(body: bytes, status: int = 200, content_type: str = "application/json", *extra: str) -> bytes:
    """A response with its length."""
    return head(status, content_type, f"content-length: {len(body)}", *extra) + body


def _logprobs(id: int) -> dict[str, Any]:
    top = [{"token": f"token_id:{id + n}", "logprob": -0.1 - n, "bytes": None} for n in range(21)]
    return {"content": [{"token": f"token_id:{id}", "logprob": -0.1, "bytes": None, "top_logprobs": top}]}


def _frame(fields: dict[str, Any]) -> bytes:
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "served"}
    return b"data: " + json.dumps(base | fields).encode() + b"\n\n"


def _choice(delta: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | more]


ROLE = _frame({"choices": _choice({"role": "assistant", "content": ""}), "prompt_token_ids": PROMPT_IDS})
CONTENT = tuple(
    _frame({"choices": _choice({"content": text}, logprobs=_logprobs(id), token_ids=[id])}) for id, text in TOKENS
)
FINISH = _frame({"choices": _choice({}, finish_reason="stop", token_ids=[])})
USAGE = _frame({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}})
FRAMES = (ROLE, *CONTENT, FINISH, USAGE, DONE)
BARE_CONTENT = tuple(_frame({"choices": _choice({"content": text})}) for _, text in TOKENS)

MESSAGE: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "served",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "One two three"},
            "logprobs": {"content": [_logprobs(id)["content"][0] for id, _ in TOKENS]},
            "finish_reason": "stop",
            "token_ids": [id for id, _ in TOKENS],
        }
    ],
    "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7},
    "prompt_token_ids": PROMPT_IDS,
}
BODY = json.dumps(MESSAGE).encode()
SSE_HEAD = head(200, "text/event-stream; charset=utf-8", "transfer-encoding: chunked")


def stream(frames: Iterable[bytes] = FRAMES, pause: float = 0.0) -> list[bytes | float]:
    """A whole stream, a frame per write."""
    steps: list[bytes | float] = [SSE_HEAD]
    for frame in frames:
        if pause:
            steps.append(pause)
        steps.append(chunk(frame))
    return [*steps, LAST_CHUNK]
