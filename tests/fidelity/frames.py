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


_RESPONSE = (
    '"id":"resp_1","object":"response","created_at":1,"model":"m","status":"%s","error":null,"instructions":null,'
    '"metadata":{},"parallel_tool_calls":true,"temperature":1.0,"tool_choice":"auto","tools":[],"top_p":1.0,'
    '"output":%s,"usage":%s'
)
_REASONED = '[{"type":"reasoning","id":"rs_1","summary":[],"encrypted_content":"x","status":null}]'
_COUNTED = (
    '{"input_tokens":4,"input_tokens_details":{"cached_tokens":0},"output_tokens":3,'
    '"output_tokens_details":{"reasoning_tokens":1},"total_tokens":7}'
)
_CREATED = '{"type":"response.created","sequence_number":0,"response":{%s}}' % (
    _RESPONSE % ("in_progress", "[]", "null")
)
_COMPLETED = '{"type":"response.completed","sequence_number":3,"response":{%s}}' % (
    _RESPONSE % ("completed", _REASONED, _COUNTED)
)


def _delta(number: int, said: str) -> bytes:
    place = '"item_id":"msg_1","output_index":0,"content_index":0'
    kind = "response.output_text.delta"
    return event(kind, f'{{"type":"{kind}","sequence_number":{number},{place},"delta":"{said}","logprobs":[]}}')


RESPONSE = (
    event("response.created", _CREATED),
    _delta(1, "One"),
    _delta(2, " two"),
    event("response.completed", _COMPLETED),
)
RESPONSE_BODY = ("{%s}" % (_RESPONSE % ("completed", _REASONED, _COUNTED))).encode()
_MESSAGE = (
    '{"id":"msg_1","type":"message","role":"assistant","model":"m","content":%s,"stop_reason":%s,"stop_sequence":null,'
    '"usage":{"input_tokens":4,"output_tokens":3}}'
)


def _text_delta(said: str) -> bytes:
    delta = f'{{"type":"text_delta","text":"{said}"}}'
    return event("content_block_delta", f'{{"type":"content_block_delta","index":0,"delta":{delta}}}')


MESSAGE = (
    event("message_start", '{"type":"message_start","message":%s}' % (_MESSAGE % ("[]", "null"))),
    _text_delta("One"),
    _text_delta(" two"),
    event("message_stop", '{"type":"message_stop"}'),
)
MESSAGE_BODY = (_MESSAGE % ('[{"type":"text","text":"One two"}]', '"end_turn"')).encode()
STREAMS: dict[str, tuple[bytes, ...]] = {
    "/v1/chat/completions": STREAM,
    "/v1/completions": TEXTS,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
}
EMBEDDING_BODY = (
    b'{"id":"embd-1","object":"list","created":1,"model":"m","data":[{"index":0,"object":"embedding",'
    b'"embedding":[0.5,-0.25]}],"usage":{"prompt_tokens":4,"total_tokens":4,"completion_tokens":0,'
    b'"prompt_tokens_details":null}}'
)
BODIES: dict[str, bytes] = {
    "/v1/chat/completions": BODY,
    "/v1/completions": TEXT_BODY,
    "/v1/responses": RESPONSE_BODY,
    "/v1/messages": MESSAGE_BODY,
    "/v1/embeddings": EMBEDDING_BODY,
}
PATHS = tuple(STREAMS)


def script(frames: Iterable[bytes], pause: float = 0.0) -> list[Step]:
    """A stream, each frame a chunk and a write of its own."""
    return list(wire.stream(frames, pause))


def begun(frames: Iterable[bytes]) -> list[Step]:
    """The beginning of a stream."""
    return [wire.SSE_HEAD, *map(wire.chunk, frames)]


_LOGPROBS = (
    '{"content" :[ {"token":"H\\u00e9","logprob": -0.250,"bytes":[72, 195,169],"top_logprobs":['
    '{"token":"Hé","logprob":-2.5e-1,"bytes":[72,195,169]} ,{"token":"日","logprob":-1.5,"bytes":[230,151,165]}]}]}'
)
EVERYTHING = (
    b": ping\n\n",
    ROLE,
    chat('{"reasoning_content":"Let é"}'),
    b": between\n",
    chat('{"content":"Hé 😀"}').replace(b'"logprobs":null', b'"logprobs":' + _LOGPROBS.encode()),
    chat('{"tool_calls":[{"id":"c","type":"function","index":0,"function":{"name":"f","arguments":""}}]}'),
    chat('{"content":null,"tool_calls":[{"index":0,"id":null,"function":{"arguments":"{\\"a\\": 1}"}}]}'),
    chat("{}", '"tool_calls"'),
    USAGE,
    DONE,
)
CANONICAL: dict[str, bytes] = {"lf": b"".join(EVERYTHING), "crlf": b"".join(EVERYTHING).replace(b"\n", b"\r\n")}
"""Streams with everything: comments, reasoning, characters of several bytes, logprobs, tools, nulls, usage."""
