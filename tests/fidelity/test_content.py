"""Cases 25 to 40: what is said arrives as it was said, in both directions, and all of it is recorded."""

from __future__ import annotations

import hashlib
import json
import threading
from typing import Any

import pytest

from tests.fidelity.effort import assert_linear
from tests.fidelity.frames import (
    BODIES,
    BODY,
    DONE,
    FINISH,
    MESSAGE,
    ONE,
    RESPONSE,
    RESPONSE_BODY,
    ROLE,
    STREAM,
    THREE,
    TWO,
    USAGE,
    chat,
    script,
)
from tests.fidelity.gateway import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, Gateway
from tests.fidelity.meaning import assert_begins, assert_same, comments_of, events, notes, until_events
from tests.support import wire
from tests.support.fake_backend import FakeBackend, Received, Step, Until
from verifier_pool.link.queue import VERDICTS, verdict_key

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
TOOL_FRAMES = (
    ROLE,
    chat('{"tool_calls":[{"id":"call_1","type":"function","index":0,"function":{"name":"f","arguments":""}}]}'),
    chat('{"content":null,"tool_calls":[{"index":0,"id":null,"type":null,"function":{"arguments":"{\\"a\\": "}}]}'),
    chat('{"tool_calls":[{"index":0,"function":{"arguments":"1}"}}]}'),
    chat('{"tool_calls":[{"id":"call_2","type":"function","index":1,"function":{"name":"g","arguments":"{}"}}]}'),
    chat("{}", '"tool_calls"'),
    DONE,
)
REASONING = (
    ROLE,
    chat('{"reasoning":"Let me"}'),
    chat('{"reasoning_content":" think"}'),
    chat('{"reasoning":" twice","reasoning_content":" twice"}'),
    chat('{"content":"One"}'),
    FINISH,
    DONE,
)
ODD = (
    ROLE,
    chat('{"refusal":"I will not"}'),
    chat('{"annotations":[{"type":"url_citation","url_citation":{"url":"http://x"}}]}'),
    chat('{"content":"One","audio":{"id":"a"},"x_private":[1, 2.50, null]}', more=',"service_tier":null,"x":1e3'),
    chat("{}", '"stop"', ',"system_fingerprint":"fp"'),
    DONE,
)


def _exact(
    gateway: Gateway, upstream: FakeBackend, frames: tuple[bytes, ...], *, nulls: bool = False, **fields: Any
) -> None:
    upstream.script = script(frames)
    answer = gateway.ask(stream=True, **fields)
    assert answer.status == 200
    assert_same(answer.body, b"".join(frames), nulls=nulls)


def _vllm(request: Received) -> list[Step]:
    """Usage comes for whom it was asked."""
    body = json.loads(request.body)
    usage = (body.get("stream_options") or {}).get("include_usage")
    return script((ROLE, ONE, TWO, THREE, FINISH, *([USAGE] if usage else []), DONE))


@pytest.mark.cases(25)
def test_usage_for_whom_it_was_asked(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.script = _vllm
    asked = gateway.ask(stream=True, stream_options={"include_usage": True})
    assert_same(asked.body, b"".join((*STREAM[:-1], USAGE, DONE)))
    assert_same(gateway.ask(stream=True).body, b"".join(STREAM))
    assert_same(gateway.ask(stream=True, stream_options={"include_usage": False}).body, b"".join(STREAM))


@pytest.mark.cases(25)
def test_usage_in_any_chunk(gateway: Gateway, upstream: FakeBackend) -> None:
    usage = ',"usage":{"prompt_tokens":4,"total_tokens":5,"completion_tokens":1}'
    frames = (ROLE, chat('{"content":"One"}', more=usage), chat("{}", '"stop"', usage), USAGE, DONE)
    _exact(gateway, upstream, frames, stream_options={"include_usage": True, "continuous_usage_stats": True})


@pytest.mark.cases(26)
def test_stream_options_go_up(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.script = _vllm
    options = {"include_usage": True, "continuous_usage_stats": True}
    gateway.ask(stream=True, stream_options=options)
    assert json.loads(upstream.last.body)["stream_options"] == options
    gateway.ask(stream=True, stream_options={"x_unknown": 1, "include_usage": True})
    assert json.loads(upstream.last.body)["stream_options"] == {"x_unknown": 1, "include_usage": True}


@pytest.mark.cases(27, 28)
def test_reasoning_is_kept(gateway: Gateway, upstream: FakeBackend) -> None:
    _exact(gateway, upstream, REASONING)
    message = b'"content":"One two three","reasoning":"Let me","reasoning_content":"Let me"'
    body = BODY.replace(b'"content":"One two three"', message)
    upstream.script = [wire.whole(body)]
    assert_same(gateway.ask().body, body)


@pytest.mark.cases(28)
def test_reasoning_items_are_kept_streamed_and_whole(gateway: Gateway, upstream: FakeBackend) -> None:
    item = (
        b'{"type":"response.output_item.done","sequence_number":1,"item":{"type":"reasoning","encrypted_content":"x"}}'
    )
    frames = (RESPONSE[0], b"event: response.output_item.done\ndata: " + item + b"\n\n", RESPONSE[-1])
    upstream.script = script(frames)
    assert_same(gateway.ask(RESPONSES, stream=True).body, b"".join(frames))
    upstream.script = [wire.whole(RESPONSE_BODY)]
    assert_same(gateway.ask(RESPONSES).body, RESPONSE_BODY)


@pytest.mark.cases(29)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS])
def test_unknown_fields_go_up(gateway: Gateway, upstream: FakeBackend, path: str) -> None:
    fields: dict[str, Any] = {
        "return_token_ids": True,
        "chat_template_kwargs": {"enable_thinking": False, "n": 1.50},
        "x_unknown": {"deep": [None, {"a": "\u2028"}]},
        "guided_choice": ["a", "b"],
    }
    upstream.script = [wire.whole(BODIES[path])]
    assert gateway.ask(path, **fields).status == 200
    sent = json.loads(upstream.last.body)
    assert {name: sent.get(name) for name in fields} == fields


@pytest.mark.cases(30)
def test_token_ids_are_kept_for_whom_they_are(gateway: Gateway, upstream: FakeBackend) -> None:
    frames = (
        chat('{"role":"assistant","content":""}', more=',"prompt_token_ids":[1,2,3,4]'),
        ONE.replace(b'"finish_reason":null', b'"finish_reason":null,"token_ids":[11]'),
        FINISH.replace(b'"finish_reason":"stop"', b'"finish_reason":"stop","token_ids":[]'),
        DONE,
    )
    _exact(gateway, upstream, frames, return_token_ids=True)


@pytest.mark.cases(31)
def test_logprobs_in_a_stream_are_kept(gateway: Gateway, upstream: FakeBackend) -> None:
    entry = '{"token":"One","logprob":-0.25,"bytes":[79,110,101],"top_logprobs":[%s]}'
    top = '{"token":"One","logprob":-0.25,"bytes":[79,110,101]},{"token":"Two","logprob":-1.5,"bytes":[84,119,111]}'
    logprobs = ('{"content":[' + entry % top + "]}").encode()
    frames = (ROLE, ONE.replace(b'"logprobs":null', b'"logprobs":' + logprobs), FINISH, DONE)
    _exact(gateway, upstream, frames, logprobs=True, top_logprobs=2, return_tokens_as_token_ids=False)


@pytest.mark.cases(32)
@pytest.mark.parametrize("value", [b"-9999.0", b"null", b"-Infinity", b"NaN"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_odd_logprobs_break_nothing(gateway: Gateway, upstream: FakeBackend, value: bytes, stream: bool) -> None:
    entry = b'{"content":[{"token":"One","logprob":' + value + b',"bytes":null,"top_logprobs":[]}]}'
    odd = b'"logprobs":' + entry
    if stream:
        upstream.script = script((ROLE, ONE.replace(b'"logprobs":null', odd), TWO, FINISH, DONE))
    else:
        upstream.script = [wire.whole(BODY.replace(b'"logprobs":null', odd))]
    asked: list[dict[str, Any]] = [{}, {"logprobs": True, "top_logprobs": 0}]
    for fields in asked:
        answer = gateway.ask(stream=stream, **fields)
        assert answer.status == 200
        assert b"One" in answer.body
        assert b" two" in answer.body
        assert b'"logprob":' + value in answer.body or not (fields and gateway.ours)
        assert answer.body.endswith(DONE) == stream
        assert answer.whole


@pytest.mark.cases(32)
def test_missing_logprobs_break_nothing(gateway: Gateway, upstream: FakeBackend) -> None:
    frames = tuple(frame.replace(b'"logprobs":null,', b"") for frame in STREAM)
    _exact(gateway, upstream, frames, logprobs=True, top_logprobs=3)


@pytest.mark.cases(33, 34)
@pytest.mark.parametrize("usage", [True, False], ids=["usage", "plain"])
def test_tool_calls_are_unchanged(gateway: Gateway, upstream: FakeBackend, usage: bool) -> None:
    frames = (*TOOL_FRAMES[:-1], *([USAGE] if usage else []), DONE)
    options = {"stream_options": {"include_usage": True}} if usage else {}
    _exact(gateway, upstream, frames, nulls=True, tools=TOOLS, **options)


@pytest.mark.cases(34)
def test_tool_arguments_are_not_held_back(gateway: Gateway, upstream: FakeBackend) -> None:
    frames = TOOL_FRAMES[:-2]
    seen = [threading.Event() for _ in frames]
    steps: list[Step] = [wire.SSE_HEAD]
    for frame, event in zip(frames, seen, strict=True):
        steps += [wire.chunk(frame), Until(event)]
    upstream.script = [*steps, *map(wire.chunk, (TOOL_FRAMES[-2], USAGE, DONE)), wire.LAST_CHUNK]
    with gateway.call(stream=True, tools=TOOLS, stream_options={"include_usage": True}) as call:
        for at, event in enumerate(seen, 1):
            assert_begins(until_events(call, at), b"".join(frames[:at]))
            event.set()
        assert_same(call.answer().body, b"".join((*TOOL_FRAMES[:-1], USAGE, DONE)))


@pytest.mark.cases(35)
def test_long_tool_arguments_flow(gateway: Gateway, upstream: FakeBackend) -> None:
    piece = chat('{"tool_calls":[{"index":0,"function":{"arguments":"aaaaaaaaaa"}}]}')

    def flow(number: int) -> None:
        _exact(gateway, upstream, (*TOOL_FRAMES[:2], *[piece] * number, *TOOL_FRAMES[-2:]), tools=TOOLS)

    assert_linear(gateway, flow, 1000)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.cases(36, 37)
@pytest.mark.feature("record")
@pytest.mark.parametrize("frames", [STREAM, TOOL_FRAMES, REASONING, ODD], ids=["text", "tools", "reasoning", "odd"])
def test_every_frame_is_in_the_record(gateway: Gateway, upstream: FakeBackend, frames: tuple[bytes, ...]) -> None:
    upstream.script = script(frames)
    answer = gateway.ask(stream=True)
    assert_same(answer.body, b"".join(frames))
    (evidence,) = gateway.evidence(answer)
    assert evidence.shown_sha256 == _digest(answer.body)


@pytest.mark.cases(36, 37)
@pytest.mark.feature("record")
def test_the_whole_answer_is_in_the_record(gateway: Gateway, upstream: FakeBackend) -> None:
    calls = b'"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]'
    body = BODY.replace(b'"refusal":null', b'"refusal":"no",' + calls)
    upstream.script = [wire.whole(body)]
    answer = gateway.ask()
    assert_same(answer.body, body)
    (evidence,) = gateway.evidence(answer)
    assert evidence.shown_sha256 == _digest(answer.body)
    assert evidence.tool_calls == (("f", "{}"),)
    changed = body.replace(b'"name":"f"', b'"name":"g"')
    upstream.script = [wire.whole(changed)]
    (other,) = gateway.evidence(gateway.ask())
    assert other.shown_sha256 == _digest(changed)


@pytest.mark.cases(36)
@pytest.mark.feature("record")
def test_what_was_rewritten_is_in_the_record_as_it_was_shown(gateway: Gateway, upstream: FakeBackend) -> None:
    frames = (wire.ROLE, *wire.CONTENT, wire.FINISH, wire.USAGE, wire.DONE)
    upstream.script = script(frames)
    answer = gateway.ask(stream=True)
    (evidence,) = gateway.evidence(answer)
    assert evidence.shown_sha256 == _digest(answer.body)
    assert evidence.output_ids.tolist() == [11, 12, 13]


@pytest.mark.cases(38)
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, EMBEDDINGS])
def test_a_request_that_nothing_changes_goes_up_byte_for_byte(
    gateway: Gateway, upstream: FakeBackend, path: str
) -> None:
    asked = b'"messages": [ {"role":"user", "content":"h\\u00e9llo"} ], "max_tokens":  10'
    if path != MESSAGES:
        asked = b'"input":"h\\u00e9llo \xc3\xa9"'
    raw = b'{ "model" : "%s",\n %s, "z":1.0e1,"a":2 }' % (gateway.models.get(path, gateway.model).encode(), asked)
    upstream.script = [wire.whole(BODIES[path])]
    assert gateway.ask(path, raw=raw).status == 200
    assert_same(upstream.last.body, raw)


@pytest.mark.cases(38)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_values_go_up_byte_for_byte(gateway: Gateway, upstream: FakeBackend, path: str) -> None:
    values = {
        b"messages": b'[ {"role": "user", "content":"h\\u00e9llo \xc3\xa9 \\/ \\u0041", "x":1.0e1} ]',
        b"tools": b'[{"type":"function",  "function":{"name":"f","parameters":{"z":1,"a":1.50}}}]',
        b"metadata": b'{"signature": "a\\/b", "n": 12345678901234567890}',
    }
    if path == COMPLETIONS:
        values = {b"prompt": b'"h\\u00e9llo \xc3\xa9 \\/"', b"metadata": values[b"metadata"]}
    raw = b"{" + b", ".join(b'"%s": %s' % item for item in values.items())
    raw += b', "model": "%s"}' % gateway.model.encode()
    upstream.script = [wire.whole(BODIES[path])]
    assert gateway.ask(path, raw=raw).status == 200
    for value in values.values():
        _goes_up(value, upstream.last.body)


def _goes_up(value: bytes, body: bytes) -> None:
    if value not in body:
        assert notes.lenient
        name = next(name for name, sent in json.loads(body).items() if sent == json.loads(value))
        assert_same(json.dumps(json.loads(body)[name]).encode(), value)


def _decide(gateway: Gateway, id: str) -> None:
    with gateway.redis() as client:
        client.set(verdict_key(id), json.dumps({"id": id, "status": "done", "verdict": "pass", "owner": ""}), ex=60)
        client.publish(VERDICTS, id)


@pytest.mark.cases(39)
@pytest.mark.parametrize("mode", ["async", "inline"])
def test_no_data_of_ours_among_the_frames(gateway: Gateway, upstream: FakeBackend, mode: str) -> None:
    upstream.script = script(STREAM)
    with gateway.call(headers={"x-countersign-mode": mode}, stream=True) as call:
        id = call.head().header("x-countersign-id")
        if mode == "inline" and gateway.ours:
            _decide(gateway, id)
        answer = call.answer()
    said = events(answer.body)
    assert len(said) == len(STREAM)
    assert said[-1] == ("", "[DONE]")
    for kind, data in said[:-1]:
        assert kind == ""
        assert {"choices", "error"} & data.keys()
    assert bool(comments_of(answer.body)) == (mode == "inline" and gateway.ours)


@pytest.mark.cases(40)
@pytest.mark.parametrize("path", list(BODIES))
def test_no_field_of_ours_takes_the_place_of_a_standard_one(gateway: Gateway, upstream: FakeBackend, path: str) -> None:
    upstream.script = [wire.whole(BODIES[path])]
    answer = gateway.ask(path)
    assert_same(answer.body, BODIES[path])
    assert answer.header("content-type") == "application/json"


@pytest.mark.ours
def test_other_endpoints_are_marked_unverified(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.script = script(MESSAGE)
    answer = gateway.ask(MESSAGES, stream=True)
    assert_same(answer.body, b"".join(MESSAGE))
    assert (answer.header("x-countersign-verdict"), answer.header("x-countersign-reason")) == ("unverified", "endpoint")
