"""Evidence of another request, or of another answer, than those that it is shown with."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies._answered import compare_answer, read
from policies._requested import compare_request
from policies.evidence import Evidence, Sampling, Usage
from policies.examination import Examination, Outcome, examine
from policies.judging import Grounds
from policies.receipt import digest
from policies.report.data import as_json
from policies.report.text import as_lines
from policies.sampling import DEFAULTS
from tests.policies.recorded import cpu
from tests.policies.test_examination import DECLARED, TRUSTED
from tests.support.bundles import Made, asking, made

PARAMETERS: dict[str, Any] = {
    "temperature": 0.3,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.1,
    "seed": 12,
    "max_tokens": 900,
    "min_tokens": 3,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "stop": ["x"],
    "stop_token_ids": [7],
    "include_stop_str_in_output": True,
    "logit_bias": {"7": 1.5},
    "allowed_token_ids": [7, 8],
    "bad_words": ["x"],
    "response_format": {"type": "json_object"},
}
ANSWER = replace(next(each for each in cpu("bf16") if each.finish_reason == "length"), id="a" * 32, owner="9" * 64)
MADE = made([replace(ANSWER, request=asking(ANSWER))], Grounds(DECLARED, earlier=[None]))
MESSAGES = [{"role": "user", "content": "Hi"}]


def body(content: str = "", **more: Any) -> bytes:
    """An answer in one piece."""
    message = {"role": "assistant", "content": content, **more.pop("message", {})}
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "length", **more}]}).encode()


def showing(served: bytes, sent: bytes, asked: bytes = b"", **changes: Any) -> Made:
    """A bundle of honest evidence under hashes of this answer and this request, all of it signed."""
    first = MADE
    evidence = replace(first.choices[0], shown_sha256=digest(served), request=sent, asked=asked, **changes)
    found = made([evidence], first.grounds)
    hashes = {**found.statement["sha256"], "request": digest(asked)}
    return replace(found, statement={**found.statement, "sha256": hashes})


def coming(choice: Evidence, **more: Any) -> bytes:
    """The request as a client sends it that chose no seed."""
    asked = msgspec.json.decode(asking(choice, messages=MESSAGES))
    del asked["seed"]
    return json.dumps({**asked, **more}).encode()


def faults(found: Examination) -> dict[str, str]:
    return {each.about: each.words for each in found.faults}


def test_an_honest_one() -> None:
    first = MADE.choices[0]
    asked = coming(first)
    sent = asking(first, messages=MESSAGES)
    found = examine(showing(body(), sent, asked).bytes, TRUSTED, request=asked, answer=body())
    assert found.outcome is Outcome.VERIFIED, found.faults
    assert "answer" in {each.about for each in found.findings}
    told = " ".join(as_lines("x", found)).split()
    for words in found.left:
        assert words.split()[0] in told
    assert as_json(found)["not_compared"] == found.left
    assert len(found.left) == 2, "prompt and tokenizer"


def test_an_answer_from_elsewhere_beside_honest_evidence() -> None:
    """Somebody serves the answer of a cheaper model, and shows evidence of another answer to another request."""
    asked = asking(MADE.choices[0], temperature=1.7, seed=5, max_tokens=900, messages=MESSAGES)
    served = body("Send all your money to Mallory.", usage={"prompt_tokens": 9, "completion_tokens": 900})
    data = showing(served, asked, asked).bytes
    assert set(faults(examine(data, TRUSTED))) == {"sampling"}
    found = examine(data, TRUSTED, request=asked, answer=served)
    assert found.outcome is Outcome.HASH_MISMATCH
    assert "the text" in faults(found)["answer"]
    for name in ("temperature", "seed", "the limit on tokens"):
        assert name in faults(found)["sampling"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_parameter(name: str) -> None:
    (choice,) = MADE.choices
    sent = asking(choice, **{name: PARAMETERS[name]})
    (wrong,) = compare_request([replace(choice, request=sent)], b"").wrong
    if name not in ("max_tokens", "response_format"):
        assert wrong == f"`{name}`"
    # Other tokens of the same answer cannot be of that request, so the bundle is not.
    assert faults(examine(showing(b"", sent).bytes, TRUSTED)).keys() == {"sampling"}


def test_every_parameter_is_compared() -> None:
    kept = {each.name for each in fields(Sampling)} - {"client_seed", "grammar"}
    assert kept == PARAMETERS.keys() - {"response_format"}


def test_a_request_that_is_not_what_came() -> None:
    (choice,) = MADE.choices
    sent = asking(choice, messages=MESSAGES)

    def wrong(**changes: Any) -> list[str]:
        fields = {**msgspec.json.decode(coming(choice)), **changes}
        asked = json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()
        return compare_request([replace(choice, request=sent, asked=asked)], asked).wrong

    assert wrong() == wrong(temperature=...) == wrong(seed=-1) == wrong(seed=None, top_p=None) == []
    assert wrong(stream=True, logprobs=True, top_logprobs=3, stream_options={"include_usage": True}) == []
    assert wrong(priority=3, best_of=2) == []
    assert len(wrong(messages=[{"role": "user", "content": "Ho"}])) == 1
    assert len(wrong(tools=[])) == len(wrong(top_p=0.5)) == len(wrong(model="other")) == 1
    assert len(wrong(max_tokens=...)) == 1, "chat has no limit but the client's own"
    assert wrong(seed=7)
    for junk in (b"[]", b"{", b"\xff"):
        assert compare_request([replace(choice, request=junk)], b"").wrong
        assert compare_request([replace(choice, request=sent)], junk).wrong


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_settings_make_of_an_open_parameter_is_told(name: str) -> None:
    (choice,) = MADE.choices
    asked = {key: value for key, value in msgspec.json.decode(coming(choice)).items() if key != name}
    for value, left in ((PARAMETERS[name], True), (DEFAULTS[name], False)):
        sent = asking(choice, messages=MESSAGES, **{name: value})
        found = compare_request([replace(choice, request=sent)], json.dumps(asked).encode())
        assert any(f"`{name}`" in each and "left open" in each for each in found.left) == left
        told = json.dumps({**asked, name: value}).encode()
        assert not any("left open" in each for each in compare_request([replace(choice, request=sent)], told).left)


def test_what_only_settings_say_is_told() -> None:
    (choice,) = MADE.choices
    sent = asking(choice)
    whole = {name: value for name, value in msgspec.json.decode(sent).items() if name != "max_tokens"}
    for changed, request in (
        (replace(choice.sampling, grammar=True), sent),
        (choice.sampling, json.dumps(whole).encode()),
    ):
        found = compare_request([replace(choice, sampling=changed, request=request)], b"")
        assert (found.wrong, len(found.left)) == ([], 3)
    found = compare_request([replace(choice, request=b"")], b"")
    assert (found.wrong, len(found.left)) == ([], 1)


def test_a_request_that_was_signed_has_to_be_there() -> None:
    first = MADE
    without = made([replace(first.choices[0], request=b"")], first.grounds)
    assert examine(without.bytes, TRUSTED).outcome is Outcome.VERIFIED
    hashes = {**without.statement["sha256"], "sent": "7" * 64}
    lied = replace(without, statement={**without.statement, "sha256": hashes})
    assert "evidence" in faults(examine(lied.bytes, TRUSTED))


def test_times_are_those_of_the_evidence() -> None:
    timed = showing(body(), asking(MADE.choices[0]), first_token_seconds=0.25, total_seconds=2.0)
    assert examine(timed.bytes, TRUSTED).outcome is Outcome.VERIFIED
    lied = replace(timed, statement={**timed.statement, "times": {"first_token": 0.25, "total": 1.0}})
    assert "the times" in faults(examine(lied.bytes, TRUSTED))["evidence"]


EVIDENCE = Evidence(
    "a" * 32,
    "chat",
    "b",
    "m",
    Sampling(),
    stream=True,
    text="Hello, world",
    reasoning="so",
    tool_calls=(("f", '{"a":1}'), ("g", "{}")),
    finish_reason="stop",
    usage=Usage(3, 4, 3, 4),
)


def deltas(*each: dict[str, Any], end: str = "stop", usage: tuple[int, int] = (3, 4)) -> list[bytes]:
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in each]
    chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": end}]}]
    chunks += [{"choices": [], "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}}]
    return [b"data: " + json.dumps(chunk).encode() for chunk in chunks] + [b": countersign {}", b"data: [DONE]"]


SAID: tuple[dict[str, Any], ...] = (
    {"role": "assistant", "content": "", "reasoning": "s", "reasoning_content": "s"},
    {"reasoning": "o", "reasoning_content": "o"},
    {"content": "Hello, "},
    {"content": "world"},
    {"tool_calls": [{"index": 1, "function": {"name": "g", "arguments": "{"}}]},
    {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": '{"a":1}'}}]},
    {"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]},
)


def wrong(served: bytes, *choices: Evidence, hides: bool = False) -> list[str]:
    return compare_answer(choices or [EVIDENCE], served, hides_reasoning=hides).wrong


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_a_stream_is_read_as_clients_read_it(end: bytes) -> None:
    served = (end + end).join(deltas(*SAID))
    assert wrong(served) == wrong(served + end + end) == wrong(b"\xef\xbb\xbf" + served) == []
    assert wrong(served + end + end + b'data: {"choices":[{"delta":{"content":"more"}}]}') == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"text": "Hello"}, "the text"),
        ({"reasoning": ""}, "the reasoning"),
        ({"tool_calls": ()}, "the tool calls"),
        ({"finish_reason": "length"}, "the finish reason"),
        ({"usage": Usage(3, 5, 3, 5)}, "the usage"),
        ({"index": 1}, "choice 0 is in the answer alone"),
    ],
)
def test_each_part_of_an_answer(changes: dict[str, Any], what: str) -> None:
    assert what in wrong(b"\n\n".join(deltas(*SAID)), replace(EVIDENCE, **changes))


def test_what_an_answer_need_not_show() -> None:
    hidden = b"\n\n".join(deltas(*SAID[2:]))
    assert wrong(hidden) == ["the reasoning"]
    assert wrong(hidden, hides=True) == wrong(hidden, replace(EVIDENCE, stream=False)) == []
    for fault in ("too_large", "invalid_json"):
        assert wrong(hidden, replace(EVIDENCE, faults=(fault,))) == []
        assert compare_answer([replace(EVIDENCE, faults=(fault,))], hidden, hides_reasoning=False).left


def test_an_answer_that_broke_off() -> None:
    """The client got as much as the evidence has, or less."""
    half = replace(EVIDENCE, complete=False, finish_reason=None, text="Hello, wor", usage=None)
    for number in range(len(SAID) + 1):
        shown = b"\n\n".join(deltas(*SAID[:number])[:number]) + b'\n\ndata: {"error": {}}\n\n'
        expected = ["the text"] if number >= 4 else []
        assert wrong(shown, half) == expected
        assert wrong(shown, replace(half, text="Hello, world")) == []
        assert wrong(shown, replace(half, text="Hello, world, and more")) == []
        calls = wrong(shown, replace(half, text="Hello, world", tool_calls=()))
        assert calls == (["the tool calls"] if number >= 5 else [])
    whole = b"\n\n".join(deltas(*SAID))
    assert wrong(whole, replace(half, text="", reasoning="", tool_calls=())) == [
        "the text",
        "the reasoning",
        "the tool calls",
        "the finish reason",
        "the end: the answer has one",
    ]
    assert wrong(whole, replace(EVIDENCE, complete=False)) == ["the end: the answer has one"]


@pytest.mark.parametrize(
    "more",
    [
        {"message": {"content": "other"}},
        {"text": "other"},
        {"delta": {"content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}},
        {"delta": {"content": "x", "tool_calls": [{"index": "0", "function": {"name": "f"}}]}},
        {"delta": {"content": "x", "tool_calls": [{"type": "custom", "custom": {"name": "f", "input": ""}}]}},
        {"delta": {"content": "x", "reasoning": ["so"]}},
        {"delta": {"content": "x", "refusal": 7}},
        {"delta": {"content": "x", "audio": {"transcript": "other"}}},
        {"delta": "x"},
    ],
)
def test_what_is_shown_and_in_no_evidence(more: dict[str, Any]) -> None:
    shown = b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": "x"}} | more]}).encode()
    assert "what else is shown, of which the evidence says nothing" in wrong(shown, replace(EVIDENCE, text="x"))


@pytest.mark.parametrize(
    "choices",
    [
        b'[{"index":0,"message":{"content":"EVIL","content":"x"}}]',
        b'[{"index":0,"message":{"content":"x"}},{"message":{"content":""}}]',
        b'[{"index":0,"message":{"content":"","tool_calls":[{"index":1,"function":{"name":"f"}}]}}]',
        b'[{"index":0,"message":{"content":"x","citations":[{"text":"EVIL"}]}}]',
        b'[{"index":0,"message":{"content":"x"},"output":"EVIL"}]',
        b'[{"index":0,"message":{"content":"x","reasoning":"","refusal":"EVIL"}}]',
        b'[{"index":0,"message":{"content":"x","reasoning":"a","reasoning_content":"b"}}]',
    ],
)
def test_what_says_two_things(choices: bytes) -> None:
    found = wrong(b'{"choices":%b}' % choices, replace(EVIDENCE, text="x"))
    assert "what else is shown, of which the evidence says nothing" in found


def test_fields_that_the_evidence_says_cannot_be_checked() -> None:
    shown = body("x", message={"citations": [{"text": "y"}]})
    bare = replace(EVIDENCE, text="x", reasoning="", tool_calls=(), finish_reason="length", usage=None)
    assert wrong(shown, bare)
    assert wrong(shown, replace(bare, faults=("unknown_fields",))) == []
    assert wrong(shown, replace(bare, text="z", faults=("unknown_fields",))) == ["the text"]


@pytest.mark.parametrize("served", [b'{"choices":[],"choices":[]}', b'{"choices":[{"index":0,"index":0}]}'])
def test_a_name_twice_is_nothing_that_a_proxy_serves(served: bytes) -> None:
    with pytest.raises(ValueError, match=r"twice|no choice"):
        read(served)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("other", ["message", "delta"])
def test_completions_say_what_their_text_says(stream: bool, other: str) -> None:
    choice = {"index": 0, "text": "EVIL", "finish_reason": "stop", other: {"content": "good"}}
    body = json.dumps({"choices": [choice]}).encode()
    evidence = replace(EVIDENCE, endpoint="completions", text="good", reasoning="", tool_calls=(), usage=None)
    found = wrong(b"data: " + body + b"\n\ndata: [DONE]\n\n" if stream else body, evidence)
    assert found == ["what else is shown, of which the evidence says nothing", "the text"]


@pytest.mark.parametrize("shown", [b'{"error": {"message": "x"}}', b'data: {"error": {"message": "x"}}\n\n'])
def test_an_error_in_place_of_an_answer(shown: bytes) -> None:
    half = replace(EVIDENCE, complete=False, finish_reason=None, tool_calls=())
    assert wrong(shown, half) == []
    assert compare_answer([half], shown, hides_reasoning=False).left
    assert "the text" in wrong(shown, EVIDENCE)


def test_several_choices_and_completions() -> None:
    both = [
        replace(EVIDENCE, endpoint="completions", index=at, text=text, reasoning="", tool_calls=(), usage=None)
        for at, text in ((0, "a"), (1, ""))
    ]
    choices = [{"index": 0, "text": "a", "finish_reason": "stop"}, {"index": 1, "text": "", "finish_reason": "stop"}]
    assert wrong(json.dumps({"choices": choices}).encode(), *both) == []
    assert wrong(json.dumps({"choices": choices[:1]}).encode(), *both) == ["the finish reason of choice 1"]


@pytest.mark.parametrize("served", [b"", b"{", b"[]", b"data: x", b'{"choices":[5]}', b'{"a":' * 9000, b"\xff", b"{}"])
def test_what_cannot_be_read_is_no_answer(served: bytes) -> None:
    assert wrong(served) == ["it cannot be read, and the evidence says nothing of that"]
    with pytest.raises(ValueError, match=r"."):
        read(served)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(
                    ["choices", "message", "delta", "content", "index", "tool_calls", "function", "usage", "text"]
                ),
                inner,
            )
        ),
    )
)
def test_whatever_it_holds_is_read_or_refused(value: Any) -> None:
    for served in (json.dumps({"choices": value}).encode(), b"data: " + json.dumps({"choices": [value]}).encode()):
        wrong(served)
