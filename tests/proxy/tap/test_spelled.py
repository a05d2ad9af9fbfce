"""However a backend spells its answer: what clients read of it is what the evidence holds, or there is a fault."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from policies._answered import compare_answer
from policies.evidence import WITHHELD_FAULTS, Endpoint, Evidence
from policies.message import KNOWN, ODD, UNKNOWN, Call, Function, Message
from tests.proxy.tap.bodies import (
    DONE,
    body,
    choice,
    chunk,
    ending,
    opening,
    run,
    sse,
    stream_tap,
    usage_chunk,
    whole_tap,
)
from tests.proxy.tap.test_whole import completion

_PLAIN: dict[str, Any] = {"return_token_ids": True}
"""Of a client that gets answers without logprobs as they come."""


def encoded(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def whole(*choices: dict[str, Any], endpoint: Endpoint = "chat", **asked: Any) -> tuple[dict[str, Any], list[Evidence]]:
    tap = whole_tap(endpoint, **asked)
    out = run(tap, encoded(body(*choices)))
    choices_found = tap.evidence()
    # Whatever a backend did, its proxy's evidence is of what was shown.
    assert compare_answer(choices_found, out, hides_reasoning=False).wrong == []
    return json.loads(out), choices_found


def streamed(*deltas: dict[str, Any]) -> tuple[bytes, Evidence]:
    tap = stream_tap()
    out = run(
        tap, opening() + b"".join(chunk(choice(delta=delta)) for delta in deltas) + ending() + usage_chunk() + DONE
    )
    (evidence,) = tap.evidence()
    assert compare_answer([evidence], out, hides_reasoning=False).wrong == []
    return out, evidence


def message(**fields: Any) -> dict[str, Any]:
    return {**body()["choices"][0], "message": {"role": "assistant", "content": "ab", **fields}}


@pytest.mark.parametrize("other", ["message", "delta"])
@pytest.mark.parametrize("count", [1, 12])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_completion_says_what_its_text_says(other: str, count: int, streamed: bool) -> None:
    one = {**completion(text="EVIL"), other: {"content": "ab"}}
    if not streamed:
        _, (evidence,) = whole(one, endpoint="completions")
    else:
        tap = stream_tap("completions")
        ends = [None] * (count - 1) + ["stop"]
        tap.feed(b"".join(chunk({**one, "finish_reason": end}) for end in ends) + DONE)
        (evidence,) = tap.evidence()
    assert evidence.text == "EVIL" * (count if streamed else 1)
    assert ODD in evidence.faults
    assert ODD in WITHHELD_FAULTS


@pytest.mark.parametrize("count", [1, 12])
@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"tool_calls": [{"index": "0", "function": {"name": "pay", "arguments": "{}"}}]}, ODD),
        ({"tool_calls": [{"index": 0, "function": {"name": "pay", "arguments": {"to": "mallory"}}}]}, ODD),
        ({"tool_calls": [{"index": 0, "type": "custom", "custom": {"name": "shell", "input": "x"}}]}, ODD),
        ({"reasoning": ["EVIL"]}, ODD),
        ({"refusal": "EVIL"}, ODD),
        ({"content": [{"type": "text", "text": "EVIL"}]}, ODD),
        ({"audio": {"transcript": "EVIL"}}, ODD),
        ({"citations": [{"text": "EVIL"}]}, UNKNOWN),
    ],
)
def test_what_is_spelled_oddly_is_a_fault(fields: dict[str, Any], fault: str, count: int) -> None:
    _, (evidence,) = whole(message(**fields))
    assert fault in evidence.faults
    _, evidence = streamed(*[{"content": "a", **fields}] * count)
    assert fault in evidence.faults


def test_an_index_twice() -> None:
    _, (evidence,) = whole(message(content="Yes"), message(content=", but no."))
    assert ODD in evidence.faults
    bare = [{name: value for name, value in message().items() if name != "index"}, message()]
    assert ODD in whole(*bare)[1][0].faults
    for twice, expected in (
        ((choice(0), choice(1)), ()),
        ((choice(0), choice(0)), (ODD,)),
        ((choice(1), choice(1)), (ODD,)),
    ):
        tap = stream_tap(n=2)
        tap.feed(opening(0) + opening(1) + chunk(*twice) + ending(0) + ending(1) + usage_chunk() + DONE)
        for each in tap.evidence():
            assert [fault for fault in each.faults if fault == ODD] == list(expected)


def test_another_end() -> None:
    for second, odd in (("stop", False), ("length", True)):
        tap = stream_tap()
        tap.feed(opening() + chunk(choice()) + ending(ids=()) + ending(ids=(), reason=second) + usage_chunk() + DONE)
        assert (ODD in tap.evidence()[0].faults) == odd


@pytest.mark.parametrize("count", [1, 12])
def test_more_after_a_choice_has_its_end(count: int) -> None:
    tap = stream_tap(n=2)
    more = b"".join(chunk(choice(1, content=", but no.")) for _ in range(count))
    tap.feed(opening(0) + opening(1) + ending(1) + chunk(choice(0)) + more + ending(0) + usage_chunk() + DONE)
    first, second = tap.evidence()
    assert ODD not in first.faults
    assert ODD in second.faults


def test_a_name_twice_is_not_passed_on() -> None:
    plain = body({**message(), "logprobs": None})
    honest, spaced = encoded(plain), json.dumps(plain).encode()
    assert run(whole_tap(**_PLAIN), honest) == honest
    assert run(whole_tap(**_PLAIN), spaced) == spaced
    for spelled in (
        honest.replace(b'"choices":', b'"choices":[{"index":0,"message":{"content":"EVIL"}}],"choices":', 1),
        honest.replace(b'"message":', b'"message":{"content":"EVIL"},"message":', 1),
        honest.replace(b'"choices":', b'"choices": [{"message":{"content":"EVIL"}}], "choices" :', 1),
    ):
        assert run(whole_tap(**_PLAIN), spelled) == honest
    inner = honest.replace(b'"content":"ab"', b'"content":"EVIL","content":"ab"', 1)
    assert inner != honest
    tap = whole_tap(**_PLAIN)
    run(tap, inner)
    assert ODD in tap.evidence()[0].faults


def test_a_name_twice_in_a_chunk_is_not_passed_on() -> None:
    asked = {**_PLAIN, "stream_options": {"include_usage": True}}
    for honest in (opening(), chunk(choice(logprobs=None)), usage_chunk()):
        evil = honest.replace(b'"choices":', b'"choices":[{"index":0,"delta":{"content":"EVIL"}}],"choices":', 1)
        other = honest.replace(b'"delta":', b'"delta":{"content":"EVIL"},"delta":', 1)
        expected = stream_tap(**asked).feed(honest)
        assert stream_tap(**asked).feed(evil) == stream_tap(**asked).feed(other) == expected
    tap = stream_tap()
    chunks = [chunk(choice()).replace(b'"content":"a"', b'"content":"EVIL","content":"a"') for _ in range(12)]
    tap.feed(opening() + b"".join(chunks) + ending() + DONE)
    assert ODD in tap.evidence()[0].faults


def test_an_error_that_says_something() -> None:
    tap = stream_tap()
    tap.feed(opening() + sse({"error": {}, "choices": [choice(content="EVIL")]}) + ending() + DONE)
    assert ODD in tap.evidence()[0].faults
    tap = stream_tap()
    tap.feed(opening() + sse({"error": {"message": "x"}}))
    assert ODD not in tap.evidence()[0].faults


_NAMES = [
    "content",
    "refusal",
    "reasoning",
    "tool_calls",
    "function_call",
    "audio",
    "name",
    "arguments",
    "function",
    "x",
]
_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=3),
    max_leaves=6,
)
_FUNCTION = st.fixed_dictionaries({}, optional={"name": st.text(max_size=3), "arguments": _ANYTHING})
_CALLS = st.fixed_dictionaries({}, optional={"index": st.integers(0, 2), "function": _FUNCTION, "custom": _ANYTHING})
_MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "content": st.text(max_size=3) | _ANYTHING,
        "reasoning": st.none() | st.text(max_size=3),
        "tool_calls": st.lists(_CALLS, max_size=2) | _ANYTHING,
        **dict.fromkeys(("refusal", "function_call", "audio", "annotations", "x"), _ANYTHING),
    },
)


def _says(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_says, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and value != ""


@given(_MESSAGES, st.dictionaries(st.sampled_from(["text", "delta", "x"]), _ANYTHING, max_size=1))
@example({"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, {})
def test_an_sdk_shows_what_the_evidence_holds_or_there_is_a_fault(said: dict[str, Any], more: dict[str, Any]) -> None:
    shown, (evidence,) = whole({**message(), "message": said, **more})
    read: Any = ChatCompletion.construct(**shown).choices[0]
    if {ODD, UNKNOWN} & set(evidence.faults):
        return
    assert (read.message.content or "") == evidence.text
    assert (getattr(read.message, "reasoning", None) or "") == evidence.reasoning
    calls = [call.function for call in read.message.tool_calls or ()]
    named = tuple((call.name or "", call.arguments or "") if call else ("", "") for call in calls)
    assert named == evidence.tool_calls
    for name in ("refusal", "function_call", "audio", "annotations", "x"):
        assert not _says(said.get(name))
    assert not any(map(_says, more.values()))


@given(_ANYTHING, st.dictionaries(st.sampled_from(["message", "delta", "x"]), _ANYTHING, max_size=1))
def test_so_it_is_with_completions(text: Any, more: dict[str, Any]) -> None:
    shown, (evidence,) = whole(completion(text=text, **more), endpoint="completions")
    if {ODD, UNKNOWN} & set(evidence.faults):
        return
    read: Any = Completion.construct(**shown).choices[0]
    assert (read.text or "") == evidence.text
    assert not any(map(_says, more.values()))


@given(st.lists(_MESSAGES, min_size=1, max_size=3))
def test_so_it_is_with_streams(deltas: list[dict[str, Any]]) -> None:
    out, evidence = streamed(*deltas)
    if {ODD, UNKNOWN} & set(evidence.faults):
        return
    lines = [line.removeprefix(b"data: ") for line in out.split(b"\n") if line.startswith(b"data: {")]
    parts: list[Any] = [ChatCompletionChunk.construct(**json.loads(line)).choices[0].delta for line in lines]
    assert "".join(part.content or "" for part in parts) == evidence.text
    said: dict[int, tuple[str, str]] = {}
    for call in (call for part in parts for call in part.tool_calls or ()):
        name, arguments = said.get(call.index, ("", ""))
        function = call.function
        more = ("", "") if function is None else (function.name or "", function.arguments or "")
        said[call.index] = name + more[0], arguments + more[1]
    assert tuple(said[index] for index in sorted(said)) == evidence.tool_calls
    for name in ("refusal", "function_call", "audio", "annotations", "x"):
        assert not any(_says(delta.get(name)) for delta in deltas)


def _fields_of(path: Path) -> dict[str, set[str]]:
    """Names of the fields of each class in a source file."""
    return {
        node.name: {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }


def test_every_field_of_vllm_is_known() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    folder = Path(spec.origin).parent / "entrypoints"
    chat = _fields_of(folder / "openai/chat_completion/protocol.py")
    text = _fields_of(folder / "openai/completion/protocol.py")
    base = _fields_of(folder / "generate/base/protocol.py")
    said = set(Message.__struct_fields__)
    assert chat["ChatMessage"] | base["DeltaMessage"] <= said
    assert base["ToolCall"] | base["DeltaToolCall"] <= set(Call.__struct_fields__)
    assert base["DeltaFunctionCall"] | base["FunctionCall"] - {"id"} <= set(Function.__struct_fields__)
    assert chat["ChatCompletionResponseChoice"] <= KNOWN["message"]
    assert chat["ChatCompletionResponseStreamChoice"] <= KNOWN["delta"]
    assert text["CompletionResponseChoice"] | text["CompletionResponseStreamChoice"] <= KNOWN["text"]
