"""Whatever a backend sends, and whatever breaks over it, no tap raises: it is a fault that counts as the backend's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import codec
from policies.evidence import WITHHELD_FAULTS, Endpoint, Evidence
from policies.settings import BoundsSettings
from proxy.relay.body import Body
from proxy.tap import open_foreign_tap, open_tap
from proxy.tap.passed import pass_on
from proxy.tap.prepare import prepare
from proxy.tap.shown import shown
from proxy.tap.types import Tap
from tests.proxy.tap.bodies import (
    BACKEND,
    DONE,
    MODEL,
    backend,
    body,
    choice,
    chunk,
    ending,
    opening,
    run,
    stream_tap,
    usage_chunk,
    whole_tap,
)

BROKEN = (MemoryError, RecursionError, TypeError, OverflowError, KeyError, ValueError, AssertionError)

HOSTILE = [
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1" + "0" * 20, "-1" + "0" * 20, "9" * 400, "9" * 5000),
    *('"\\ud800"', '""', '"token_id:1"', '"token_id:-5"', '"token_id:99999999999"', '"token_id:0x1"', '"token_id:1_0"'),
    *('"token_id: 7 "', '"token_id:\\u0663"', "[]", "{}", "null", "true", "false", "-0.0", "0.5", "-1", "2147483647"),
    *("2147483648", "[[]]", '{"a":null}', "[null]", '["x"]', "[1,2,3]", '"stop"', "[NaN]", "1E-400", '"\\u0000"'),
    *('{"countersign":1}', '"' + "a" * 5000 + '"', "-9999.0", '{"token_id:1":-1}', '{"":NaN}', "[" * 30 + "]" * 30),
]
"""JSON that no engine writes, as text: some of it only Python reads, some nobody."""
ENDPOINTS: tuple[Endpoint, ...] = ("chat", "completions")


def _choice(endpoint: Endpoint, *, stream: bool, index: int, last: bool) -> dict[str, Any]:
    ended = {"finish_reason": "stop" if last else None, "stop_reason": None, "token_ids": [5]}
    if endpoint == "completions":
        claim = {"tokens": ["token_id:5"], "token_logprobs": [-1.0], "top_logprobs": [{"token_id:5": -1.0}]}
        return {
            "index": index,
            "text": "hi",
            "logprobs": claim | {"text_offset": [0]},
            "prompt_token_ids": [1],
            **ended,
        }
    tops = [{"token": f"token_id:{id}", "logprob": -1.0, "bytes": None} for id in (5, 6, 7)]
    call = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": "hi", "reasoning": None, "tool_calls": [call]}
    claim = {"content": [{"token": "token_id:5", "logprob": -1.0, "bytes": None, "top_logprobs": tops}]}
    name = "delta" if stream else "message"
    return {"index": index, name: said, "logprobs": claim, "routed_experts": None, **ended}


def _answer(endpoint: Endpoint, *, stream: bool, index: int, last: bool) -> dict[str, Any]:
    details = {"prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 1}}
    return {
        **{"id": "x", "object": "o", "created": 1, "model": "m", "system_fingerprint": None},
        "choices": [_choice(endpoint, stream=stream, index=index, last=last)],
        "prompt_token_ids": [1, 2],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, **details},
    }


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for name, inner in items for place in ((*at, name), *_places(inner, (*at, name)))]


@st.composite
def mutated(draw: st.DrawFn, endpoint: Endpoint, *, stream: bool, last: bool) -> bytes:
    """An answer, or a chunk of one, with up to three of its values hostile."""
    value = _answer(endpoint, stream=stream, index=draw(st.integers(0, 1)), last=last)
    swaps = {}
    for number in range(draw(st.sampled_from([0, 1, 1, 2, 3]))):
        *way, name = draw(st.sampled_from(_places(value)))
        inner: Any = value
        for step in way:
            inner = inner[step]
        inner[name] = f"@{number}@"
        swaps[f'"@{number}@"'] = draw(st.sampled_from(HOSTILE))
    text = json.dumps(value)
    for mark, hostile in swaps.items():
        text = text.replace(mark, hostile)
    return text.encode("utf-8", "surrogatepass")


ASKS = st.fixed_dictionaries(
    {},
    optional={
        "logprobs": st.just(2),
        "return_tokens_as_token_ids": st.just(True),
        "return_token_ids": st.just(True),
        "include_reasoning": st.just(False),
        "stream_options": st.just({"include_usage": True, "continuous_usage_stats": True}),
    },
)


def _tap(draw: Callable[..., Any], endpoint: Endpoint, *, stream: bool) -> tuple[Tap, bool]:
    asks = draw(ASKS)
    asked: dict[str, Any] = {"model": "m", "max_tokens": 8, "n": 2, "stream": stream} | asks
    if not stream:
        asked.pop("stream_options", None)
    if endpoint == "chat":
        asked["messages"] = [{"role": "user", "content": "hi"}]
        if "logprobs" in asks:
            asked |= {"logprobs": True, "top_logprobs": 2}
    else:
        asked["prompt"] = "hi"
        asked.pop("include_reasoning", None)
    server = backend(routed_experts="buffer") if draw(st.booleans()) else BACKEND
    request = prepare(Body.read(endpoint, json.dumps(asked).encode()), MODEL, server, seed=1)
    kinds = ["text/event-stream", "text/plain"] if request.upstream_stream else ["application/json"]
    return open_tap(request, "m", content_type=draw(st.sampled_from(kinds))), request.upstream_stream


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("streamed", [True, False])
@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_mutated_answers_never_raise(endpoint: Endpoint, streamed: bool, data: st.DataObject) -> None:
    """Nor is it only the last guard that keeps them from it."""
    tap, stream = _tap(data.draw, endpoint, stream=streamed)
    for last in (False, False, True) if stream else (True,):
        text = data.draw(mutated(endpoint, stream=stream, last=last))
        tap.feed(b"data: " + text + b"\n\n" if stream else text)
        tap.settle()
        if data.draw(st.booleans()):
            tap.used()
    if stream and data.draw(st.booleans()):
        tap.feed(DONE)
    tap.close(data.draw(st.sampled_from([None, None, "client_left"])))
    tap.used()
    evidence = tap.evidence(id="a" * 32)
    assert tap.fault != "unreadable"
    assert all("unreadable" not in one.faults for one in evidence)
    codec.unpack(codec.pack(evidence))


@pytest.mark.parametrize("digits", [308, 309, 400, 4300, 5000])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("more", [0, 1_200_000])
def test_a_logprob_of_any_length(endpoint: Endpoint, streamed: bool, digits: int, more: int) -> None:
    value = _answer(endpoint, stream=streamed, index=0, last=True)
    text = json.dumps(value).replace("-1.0", "-" + "9" * digits, 1).encode()
    text = text.replace(b'"logprobs": {', b'"logprobs": {"x": "%s", ' % (b"x" * more))
    tap = stream_tap(endpoint) if streamed else whole_tap(endpoint)
    run(tap, b"data: " + text + b"\n\n" + DONE if streamed else text)
    (one,) = tap.evidence()
    assert {"bad_logprobs", "bad_ids"} & set(one.faults)
    assert "unreadable" not in one.faults
    assert one.output_ids.tolist() == [5]


def _raising(error: type[Exception], when: Callable[[Any], bool], real: Any) -> Any:
    def broken(*given: Any, **named: Any) -> Any:
        if any(map(when, given)):
            raise error("broken")
        return real(*given, **named)

    return broken


def _check(evidence: list[Evidence]) -> Evidence:
    assert "unreadable" in WITHHELD_FAULTS
    (one,) = codec.unpack(codec.pack(evidence))
    assert "unreadable" in one.faults
    return one


def _odd(value: Any) -> bool:
    return isinstance(value, dict) and any(b"odd" in bytes(value.get(name, b"")) for name in ("delta", "message"))


@pytest.mark.parametrize("error", BROKEN)
@pytest.mark.parametrize("together", [True, False])
def test_a_chunk_that_breaks_its_reader_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], together: bool
) -> None:
    text = opening() + chunk(choice(content="odd")) + chunk(choice()) + ending() + usage_chunk() + DONE
    plain = stream_tap()
    expected = run(plain, text)
    monkeypatch.setattr("proxy.tap.collect.shown", _raising(error, _odd, shown))
    if together:
        monkeypatch.setattr("proxy.tap.together._parts", _raising(error, lambda _: True, None))
    else:
        monkeypatch.setattr("proxy.tap.collect.read_together", lambda *_: None)
    tap = stream_tap()
    assert run(tap, text) == expected
    one = _check(tap.evidence(id="a" * 32))
    assert one.output_ids.tolist() == [7, 8]
    assert one.text == "a"
    assert one.complete
    assert tap.used() == (2, 2)


@pytest.mark.parametrize("error", BROKEN)
@pytest.mark.parametrize("streamed", [True, False])
def test_a_view_that_breaks_ends_the_answer(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], streamed: bool
) -> None:
    monkeypatch.setattr("proxy.tap.view.View._choice", _raising(error, _odd, lambda *_: False))
    if streamed:
        tap = stream_tap()
        out = run(tap, opening() + chunk(choice()) + chunk(choice(content="odd")) + chunk(choice()) + ending() + DONE)
        assert out.count(b"unreadable") == 1
        assert b"[DONE]" not in out
        assert out.count(b"data: ") == 3
    else:
        tap = whole_tap()
        value = body()
        value["choices"][0]["message"]["content"] = "odd"
        error_ = json.loads(run(tap, json.dumps(value).encode()))["error"]
        assert error_["code"] == "unreadable"
    assert (tap.failed, tap.fault) == (True, "unreadable")
    _check(tap.evidence(id="a" * 32))


@pytest.mark.parametrize("error", BROKEN)
@pytest.mark.parametrize("what", ["decode_experts", "trimmed", "fitted"])
def test_evidence_that_cannot_be_composed(monkeypatch: pytest.MonkeyPatch, error: type[Exception], what: str) -> None:
    tap = whole_tap()
    value = body()
    value["choices"][0]["routed_experts"] = "AA=="
    run(tap, json.dumps(value).encode())
    monkeypatch.setattr(f"proxy.tap.compose.{what}", _raising(error, lambda _: True, None))
    one = _check(tap.evidence(id="a" * 32, backend="b", owner="o"))
    assert (one.id, one.backend, one.owner) == ("a" * 32, "b", "o")
    assert one.output_ids.tolist() == [7, 8]
    assert one.prompt_ids.tolist() == [1, 2]
    assert not one.complete


@pytest.mark.parametrize("error", BROKEN)
def test_what_was_used_is_not_known(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    tap = stream_tap()
    tap.feed(opening() + chunk(choice()))
    monkeypatch.setattr("proxy.tap.collect.Collector.prompt_of", _raising(error, lambda _: True, None))
    assert tap.used() == (None, None)


@pytest.mark.parametrize("error", BROKEN)
@pytest.mark.parametrize("where", ["_frame", "_release"])
def test_a_stream_is_closed_whatever_breaks(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], where: str
) -> None:
    tap = stream_tap()
    out = tap.feed(opening() + chunk(choice()) + ending())
    monkeypatch.setattr(f"proxy.tap.stream.StreamTap.{where}", _raising(error, lambda _: True, None))
    out += tap.feed(chunk(choice()) + usage_chunk() + DONE) + tap.close()
    assert out.count(b"unreadable") == 1
    assert tap.done == b""
    assert tap.close() == b""
    _check(tap.evidence(id="a" * 32))


@pytest.mark.parametrize("error", BROKEN)
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream", "text/plain"])
def test_endpoints_without_evidence(monkeypatch: pytest.MonkeyPatch, error: type[Exception], kind: str) -> None:
    asked = Body.read("/v1/embeddings", json.dumps({"model": "m", "input": "hi"}).encode())
    tap = open_foreign_tap(pass_on(asked, BACKEND), content_type=kind, bounds=BoundsSettings())
    for name in ("proxy.tap.foreign.ForeignTap._rewrite", "proxy.tap.foreign_other.Guard.push"):
        monkeypatch.setattr(name, _raising(error, lambda _: True, None))
    data = b'data: {"a": 1}\n\n' if "event" in kind else b'{"a": 1}' if "json" in kind else b"plain words"
    out = tap.feed(data) + tap.close()
    assert tap.failed
    assert tap.fault == "unreadable"
    assert tap.cut if kind == "text/plain" else b"unreadable" in out
