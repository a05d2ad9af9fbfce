"""What the upstream says, as bytes: what vLLM sends to a client that asks for nothing special, and stranger things."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support import wire
from tests.support.fake_backend import Step


def chat(delta: str, finish: str = "null", more: str = "") -> bytes:
    """One chunk of a chat stream, spelled as vLLM spells it."""
    choice = f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}}}'
    head = '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":['
    return f"data: {head}{choice}]{more}}}\n\n".encode()


def text(said: str, finish: str = "null") -> bytes:
    """One chunk of a text completion."""
    choice = f'{{"index":0,"text":"{said}","logprobs":null,"finish_reason":{finish}}}'
    head = '{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":['
    return f"data: {head}{choice}]}}\n\n".encode()


ROLE = chat('{"role":"assistant","content":""}')
ONE, TWO, THREE = (chat(f'{{"content":"{said}"}}') for said in ("One", " two", " three"))
FINISH = chat("{}", '"stop"')
USAGE = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],'
    b'"usage":{"prompt_tokens":4,"total_tokens":7,"completion_tokens":3}}\n\n'
)
DONE = b"data: [DONE]\n\n"
STREAM = (ROLE, ONE, TWO, THREE, FINISH, DONE)
BODY = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"One two three","refusal":null,"annotations":null},"logprobs":null,'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":4,"total_tokens":7,"completion_tokens":3}}'
)
TEXTS = (text("One"), text(" two"), text(" three", '"stop"'), DONE)
TEXT_BODY = (
    b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"One two three",'
    b'"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":4,"total_tokens":7,"completion_tokens":3}}'
)


def event(kind: str, data: str) -> bytes:
    """One typed event, as the Responses and Messages endpoints send them."""
    return f"event: {kind}\ndata: {data}\n\n".encode()


RESPONSE = (
    event("response.created", '{"type":"response.created","sequence_number":0,"response":{"id":"r","model":"m"}}'),
    event("response.output_text.delta", '{"type":"response.output_text.delta","sequence_number":1,"delta":"One"}'),
    event("response.output_text.delta", '{"type":"response.output_text.delta","sequence_number":2,"delta":" two"}'),
    event("response.completed", '{"type":"response.completed","sequence_number":3,"response":{"id":"r","model":"m"}}'),
)
RESPONSE_BODY = b'{"id":"r","object":"response","model":"m","output":[{"type":"reasoning","id":"rs","summary":[]}]}'
MESSAGE = (
    event("message_start", '{"type":"message_start","message":{"id":"a","model":"m","content":[]}}'),
    event("content_block_delta", '{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"One"}}'),
    event(
        "content_block_delta", '{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":" two"}}'
    ),
    event("message_stop", '{"type":"message_stop"}'),
)
MESSAGE_BODY = b'{"id":"a","type":"message","model":"m","content":[{"type":"text","text":"One two"}]}'
STREAMS: dict[str, tuple[bytes, ...]] = {
    "/v1/chat/completions": STREAM,
    "/v1/completions": TEXTS,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
}
BODIES: dict[str, bytes] = {
    "/v1/chat/completions": BODY,
    "/v1/completions": TEXT_BODY,
    "/v1/responses": RESPONSE_BODY,
    "/v1/messages": MESSAGE_BODY,
}
PATHS = tuple(STREAMS)


def script(frames: Iterable[bytes], pause: float = 0.0) -> list[Step]:
    """A stream, each frame a chunk and a write of its own."""
    return list(wire.stream(frames, pause))


def begun(frames: Iterable[bytes]) -> list[Step]:
    """The beginning of a stream."""
    return [wire.SSE_HEAD, *map(wire.chunk, frames)]


_LOGPROBS = (
    '{"content":[{"token":"Hé","logprob":-0.25,"bytes":[72,195,169],"top_logprobs":['
    '{"token":"Hé","logprob":-0.25,"bytes":[72,195,169]},{"token":"日","logprob":-1.5,"bytes":[230,151,165]}]}]}'
)
_ALL = (
    b": ping\n\n",
    ROLE,
    chat('{"reasoning":"Let é"}'),
    b": between\n",
    chat('{"content":"Hé 😀"}').replace(b'"logprobs":null', b'"logprobs":' + _LOGPROBS.encode()),
    chat('{"tool_calls":[{"id":"c","type":"function","index":0,"function":{"name":"f","arguments":""}}]}'),
    chat('{"content":null,"tool_calls":[{"index":0,"id":null,"function":{"arguments":"{\\"a\\": 1}"}}]}'),
    chat("{}", '"tool_calls"'),
    USAGE,
    DONE,
)
CANONICAL: dict[str, bytes] = {"lf": b"".join(_ALL), "crlf": b"".join(_ALL).replace(b"\n", b"\r\n")}
"""Streams with everything: comments, reasoning, characters of several bytes, logprobs, tools, nulls, usage."""
UNASKED = [event for event in _ALL if b"top_logprobs" not in event]
"""The same for a client that asks for no logprobs."""
