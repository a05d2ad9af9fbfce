"""The client's view through the gateway is what the backend would have sent to the client itself, byte for byte."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from tests.fidelity.gateway import Gateway, Gateways
from tests.fidelity.meaning import assert_begins, events, notes
from tests.fidelity.meaning import assert_same as assert_said
from tests.fidelity.recordings import ANSWERS, Recording
from tests.fidelity.virtual import DONE, Frame, Generation
from tests.proxy.tap.compare import assert_same, text
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, Received, Step

GENERATIONS = [Generation(recording) for recording in ANSWERS]
STREAMS = [generation for generation in GENERATIONS if generation.stream]
TEXT = st.text(max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
).filter(lambda value: "countersign" not in json.dumps(value).lower())
TOOL_CALLS = [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.fixture
def named(gateways: Gateways) -> Gateway:
    """A gateway that knows the recorded model's tokenizer, where that is something it can know."""
    return gateways.variant("recorded", otherwise="plain")


@pytest.mark.parametrize("recording", ANSWERS, ids=lambda recording: recording.label)
def test_the_virtual_vllm_says_what_the_real_one_said(recording: Recording) -> None:
    if text(recording.body, stream=recording.stream) != text(recording.plain, stream=recording.stream):
        return  # two runs on a GPU may differ
    generation = Generation(recording)
    request = dict(recording.plain_request)
    asked = request.get("top_logprobs") or 0 if generation.chat else request.get("logprobs") or 0
    if request.get("logprobs") not in (None, False) and asked > generation.named:
        return  # ties: which of two equal alternatives came first differs
    rendered = b"".join(generation.render(request))
    assert_same(recording.plain, rendered, stream=recording.stream)


@st.composite
def requests(draw: st.DrawFn, generation: Generation) -> Frame:
    """What a client may ask for, as long as the generation is the same one."""
    request = {name: value for name, value in generation.request.items() if "logprobs" not in name}
    request |= {"model": "m", "stream": generation.stream}
    for name in ("stream_options", "return_token_ids", "return_tokens_as_token_ids"):
        request.pop(name, None)
    as_ids = draw(st.booleans())
    most = 20 if as_ids else generation.named
    if most >= 0 and draw(st.booleans()):
        count = draw(st.integers(0, most))
        request |= {"logprobs": True, "top_logprobs": count} if generation.chat else {"logprobs": count}
    if as_ids:
        request["return_tokens_as_token_ids"] = True
    for name in ("return_token_ids",):
        if draw(st.booleans()):
            request[name] = draw(st.sampled_from([True, False, None]))
    if generation.stream and draw(st.booleans()):
        options = st.fixed_dictionaries(
            {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
        )
        request["stream_options"] = draw(options)
    if draw(st.booleans()):
        request["seed"] = draw(st.integers(0, 2**31))
    return request | draw(st.dictionaries(st.from_regex(r"x_[a-z]{1,8}", fullmatch=True), VALUES, max_size=2))


@st.composite
def mutated(draw: st.DrawFn, generation: Generation) -> Generation:
    """The same generation of a backend with ways of its own."""
    new = copy.copy(generation)
    new.frames = copy.deepcopy(generation.frames)
    for _ in range(draw(st.integers(0, 4))):
        frame = draw(st.sampled_from(new.frames))
        kind = draw(st.sampled_from(["top", "choice", "delta", "null", "text", "tool", "finish", "comment"]))
        _mutate(draw, new, frame, kind)
    return new


def _mutate(draw: st.DrawFn, generation: Generation, frame: Frame, kind: str) -> None:
    if "done" in frame or "comment" in frame:
        return
    choice = draw(st.sampled_from(frame["choices"])) if frame.get("choices") else None
    part = next((choice[name] for name in ("delta", "message") if name in choice), None) if choice else None
    if kind == "top":
        frame[draw(st.sampled_from(["x_top", "service_tier", "é"]))] = draw(VALUES)
    elif kind == "comment" and generation.stream:
        at = next(at for at, other in enumerate(generation.frames) if other is frame)
        generation.frames.insert(at, {"comment": draw(st.sampled_from(["ping", "keep-alive", "é"]))})
    elif choice is None:
        return
    elif kind == "choice":
        choice["x_choice"] = draw(VALUES)
    elif kind == "null":
        for name in [name for name, value in choice.items() if value is None and name != "finish_reason"]:
            del choice[name]
    elif kind == "text" and "text" in choice:
        choice["text"] = draw(TEXT)
    elif part:
        if kind == "delta":
            part["x_delta"] = draw(VALUES)
        elif kind == "text" and "content" in part:
            part["content"] = draw(TEXT)
        elif kind == "tool":
            part["tool_calls"] = TOOL_CALLS
        elif kind == "finish" and choice.get("finish_reason"):
            choice["finish_reason"] = draw(st.sampled_from(["stop", "length", "tool_calls", "content_filter"]))


def _answers(generation: Generation) -> Any:
    """A script that renders the generation for whatever was asked of the backend."""

    def answer(request: Received) -> list[Step]:
        said = generation.render(json.loads(request.body))
        if not generation.stream:
            return [wire.whole(said[0])]
        return list(wire.stream(said))

    return answer


def _assert_same(got: bytes, want: bytes, generation: Generation, end: bytes = b"\n\n") -> None:
    """Byte for byte. How the events of several choices interleave is chance, so those are held against each other
    choice by choice."""
    if generation.choices == 1 or not generation.stream:
        assert_said(got, want)
        return
    assert len(got) == len(want) or notes.lenient
    mine, theirs = _by_choice(got, end), _by_choice(want, end)
    assert mine.keys() == theirs.keys()
    for index, said in theirs.items():
        assert_said(end.join(mine[index]) + end, end.join(said) + end)


def _by_choice(body: bytes, end: bytes) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    for event in body.removesuffix(end).split(end):
        choices = json.loads(event[5:]).get("choices") if event.startswith((b"data: {", b"data:{")) else None
        index = choices[0]["index"] if choices else -2 if event.startswith(b":") else -1
        found.setdefault(index, []).append(event)
    return found


# Shrinking over the network takes minutes; what failed is printed as it was.
OVER_HTTP = settings(
    deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.reuse, Phase.generate)
)


@settings(OVER_HTTP, max_examples=150)
@given(data=st.data())
def test_the_clients_view_is_the_backends_own(named: Gateway, upstream: FakeBackend, data: st.DataObject) -> None:
    generation = data.draw(mutated(data.draw(st.sampled_from(GENERATIONS))))
    request = data.draw(requests(generation))
    upstream.script = _answers(generation)
    answer = named.ask(generation.path, raw=json.dumps(request).encode())
    assert answer.status == 200
    _assert_same(answer.body, b"".join(generation.render(request)), generation)
    assert answer.whole


@settings(OVER_HTTP, max_examples=60)
@given(
    data=st.data(),
    end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    space=st.booleans(),
    size=st.sampled_from([1, 7, 100, 4096]),
)
def test_however_it_is_spelled_and_cut(
    named: Gateway, upstream: FakeBackend, data: st.DataObject, end: bytes, space: bool, size: int
) -> None:
    generation = data.draw(mutated(data.draw(st.sampled_from(STREAMS))))
    request = data.draw(requests(generation))

    def spelled(asked: Frame) -> bytes:
        said = b"".join(generation.render(asked)).replace(b"\n", end)
        return said if space else said.replace(b"data: {", b"data:{")

    def answer(received: Received) -> list[Step]:
        said = spelled(json.loads(received.body))
        pieces = b"".join(wire.chunk(said[at : at + size]) for at in range(0, len(said), size))
        return [wire.SSE_HEAD, pieces, wire.LAST_CHUNK]

    upstream.script = answer
    body = named.ask(generation.path, raw=json.dumps(request).encode()).body
    _assert_same(body, spelled(request), generation, end * 2)


@settings(OVER_HTTP, max_examples=40)
@given(data=st.data())
def test_up_to_where_the_backend_broke_off(named: Gateway, upstream: FakeBackend, data: st.DataObject) -> None:
    generation = data.draw(mutated(data.draw(st.sampled_from(STREAMS))))
    last = next(at for at, frame in enumerate(generation.frames) if _ends(frame))
    assume(last > 1)
    generation.frames = generation.frames[: data.draw(st.integers(1, last))]
    request = data.draw(requests(generation))
    sent = b"".join(generation.render(request))
    assume(b"data: {" in sent)

    def answer(received: Received) -> list[Step]:
        steps = list(wire.stream(generation.render(json.loads(received.body))))
        return [*steps[:-1], Close()]

    upstream.script = answer
    body = named.ask(generation.path, raw=json.dumps(request).encode()).body
    assert_begins(body, sent)
    assert events(body)[-1][1]["error"]["code"]
    assert DONE not in generation.frames


def _ends(frame: Frame) -> bool:
    return any(choice.get("finish_reason") for choice in frame.get("choices", []))
