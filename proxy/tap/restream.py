"""A whole answer, streamed to a client that asked for a stream.

Mixture-of-experts backends return expert ids only with whole answers, so `routed_experts: buffer` asks
upstream without streaming. The client gets the frames vLLM would have sent, had it been very slow: for each
choice a role chunk, one chunk with everything, and a finish chunk; then usage, where asked for.
"""

from __future__ import annotations

from typing import Any

from msgspec import Raw

from proxy.tap.base import DONE, INVALID_JSON, error_frame
from proxy.tap.outline import is_deeper
from proxy.tap.rawjson import NULL, Object, is_null, raw, read_object, read_objects, write
from proxy.tap.whole import WholeTap


class RestreamTap(WholeTap):
    """JSON body in, server-sent events out."""

    content_type: str | None = "text/event-stream; charset=utf-8"

    def ended(self, fault: str) -> bytes:
        """An error frame: the client waits for events."""
        self.fault = fault
        return error_frame(fault)

    def answer(self, body: bytes) -> bytes:
        """The events of an answer that arrived whole."""
        if is_deeper(body, self.allowed.depth):
            return self.over("too_deep")
        top = read_object(body)
        if top is not None and not is_null(top.get("error")):
            self.collector.fault("upstream_error")
            self.view.response(top)
            self.done = DONE
            self.refusal = write({"error": top["error"]})
            return _frame({"error": top["error"]})
        if top is not None and self.collector.too_many(top):
            return self.over("too_large")
        result = None if top is None else self.whole(top)
        if result is None:
            self.collector.fault(INVALID_JSON)
            return self.ended(INVALID_JSON)
        shown, _ = result
        choices = read_objects(shown["choices"]) or []
        frames = self._chat(shown, choices) if self.prepared.endpoint == "chat" else self._completions(shown, choices)
        if self.prepared.asked.usage and not is_null(shown.get("usage")):
            frames.append(self._usage(shown))
        self.done = DONE
        return b"".join(_frame(frame) for frame in frames)

    def _chat(self, top: Object, choices: list[Object]) -> list[dict[str, Any]]:
        kind = "chat.completion.chunk"
        opening = {name: top.get(name, NULL) for name in ("prompt_token_ids", "prompt_text")}
        frames = []
        for choice in choices:
            message = read_object(choice.get("message", NULL)) or {}
            role = {"role": message.get("role", raw("assistant")), "content": ""}
            first = {"index": choice.get("index"), "delta": role, "logprobs": None, "finish_reason": None}
            frames.append({**_head(top, kind), "choices": [first], **opening})
        for choice in choices:
            delta = _delta(read_object(choice.get("message", NULL)) or {})
            if delta or not is_null(choice.get("logprobs")) or not is_null(choice.get("token_ids")):
                body = {
                    "index": choice.get("index"),
                    "delta": delta,
                    "logprobs": choice.get("logprobs", NULL),
                    "finish_reason": None,
                    "token_ids": choice.get("token_ids", NULL),
                }
                frames.append({**_head(top, kind), "choices": [body]})
            last: dict[str, Any] = {
                "index": choice.get("index"),
                "delta": {},
                "logprobs": None,
                "finish_reason": choice.get("finish_reason", NULL),
                "stop_reason": choice.get("stop_reason", NULL),
                "token_ids": _rest(choice),
            }
            frames.append({**_head(top, kind), "choices": [last], **self._fingerprint(top)})
        return frames

    def _completions(self, top: Object, choices: list[Object]) -> list[dict[str, Any]]:
        frames = []
        for choice in choices:
            common = {"index": choice.get("index"), "text": choice.get("text", raw(""))}
            body = {
                **common,
                "logprobs": choice.get("logprobs", NULL),
                "finish_reason": None,
                "stop_reason": None,
                "prompt_token_ids": choice.get("prompt_token_ids", NULL),
                "token_ids": choice.get("token_ids", NULL),
            }
            frames.append({**_head(top, "text_completion"), "choices": [body]})
            last = {
                **body,
                "text": "",
                "logprobs": None,
                "finish_reason": choice.get("finish_reason", NULL),
                "stop_reason": choice.get("stop_reason", NULL),
                "prompt_token_ids": None,
                "token_ids": _rest(choice),
            }
            frames.append({**_head(top, "text_completion"), "choices": [last], **self._fingerprint(top)})
        return frames

    def _fingerprint(self, top: Object) -> dict[str, Raw]:
        """On terminal chunks, unless a usage chunk follows and carries it."""
        fingerprint = top.get("system_fingerprint")
        if self.prepared.asked.usage or fingerprint is None or is_null(fingerprint):
            return {}
        return {"system_fingerprint": fingerprint}

    def _usage(self, top: Object) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.prepared.endpoint == "chat" else "text_completion"
        usage = read_object(top["usage"]) or {}
        kept = {name: value for name, value in usage.items() if not is_null(value)}
        frame: dict[str, Any] = {**_head(top, kind), "choices": [], "usage": kept}
        for name in ("system_fingerprint", "metrics"):
            if not is_null(top.get(name)):
                frame[name] = top[name]
        return frame


def _head(top: Object, kind: str) -> dict[str, Any]:
    return {"id": top.get("id"), "object": kind, "created": top.get("created"), "model": top.get("model")}


def _delta(message: Object) -> dict[str, Any]:
    """What a message becomes as one delta: content, reasoning, and tool calls with their indices."""
    delta: dict[str, Any] = {}
    for name in ("content", "reasoning"):
        if not is_null(message.get(name)):
            delta[name] = message[name]
    calls = read_objects(message.get("tool_calls", NULL)) or []
    if calls:
        order = ("id", "type")
        delta["tool_calls"] = [
            {**{k: call[k] for k in order if k in call}, "index": at, **{k: call[k] for k in call if k not in order}}
            for at, call in enumerate(calls)
        ]
    return delta


def _rest(choice: Object) -> list[int] | None:
    """All ids went with the text, so the finish chunk has none; `null` where the client asked for none."""
    return None if is_null(choice.get("token_ids")) else []


def _frame(fields: dict[str, Any]) -> bytes:
    return b"data: " + write(fields) + b"\n\n"
