"""What the tap keeps of what a choice shows, and which requests it marks as bound by a grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from policies import structure
from policies.message import ODD, UNKNOWN, Place, Shown, Transcript, of_value
from policies.settings import BackendSettings, ModelSettings
from proxy.relay.body import Body
from proxy.tap import prepare
from proxy.tap.rawjson import read_object
from proxy.tap.repeats import any_repeats, repeats
from proxy.tap.shown import shown
from tests.proxy.tap.test_recorded import ANSWERS, Recording, label
from verifier_pool.tokenizer import TokenizerSpelling

CALL = {"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def of(choice: dict[str, Any], place: Place) -> Shown:
    fields = read_object(json.dumps(choice).encode())
    assert fields is not None
    return shown(fields, place)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "assistant", "content": "hi", "audio": None, "annotations": None, "x": None}, Shown("hi")),
        ({"content": "a", "annotations": [], "x": 7, "y": [{"z": None}, ""]}, Shown("a")),
        ({"content": None, "refusal": "no"}, Shown("no", fault=ODD)),
        ({"content": "a", "refusal": ""}, Shown("a")),
        ({"content": "a", "reasoning": "r", "reasoning_content": "r"}, Shown("a", "r", older="r")),
        ({"tool_calls": [CALL]}, Shown("", "", ((0, "f", '{"a"'),))),
        ({"tool_calls": [{"type": "function", "function": None}], "audio": None}, Shown("", "", ((0, "", ""),))),
        ({"function_call": {"name": "f", "arguments": "{}"}}, Shown("", "", ((-1, "f", "{}"),), fault=ODD)),
        ({"content": "a", "tool_calls": 7}, Shown("a", fault=ODD)),
        ({"content": 7}, Shown(fault=ODD)),
        ({"content": [{"type": "text", "text": "a"}]}, Shown(fault=ODD)),
        ({"content": "a", "tool_calls": [{**CALL, "index": "0"}]}, Shown("a", fault=ODD)),
        ({"content": "a", "tool_calls": [CALL], "refusal": 7}, Shown("a", fault=ODD)),
        ({"content": "a", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, Shown("a", fault=ODD)),
        ({"content": "a", "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}, Shown("a", fault=ODD)),
        ({"content": "a", "tool_calls": [{"function": {"name": "f", "more": "x"}}]}, Shown("a", fault=ODD)),
        ({"content": "a", "reasoning": ["b"]}, Shown("a", fault=ODD)),
        ({"content": "a", "audio": {"transcript": "b"}}, Shown("a", fault=ODD)),
        ({"content": "a", "annotations": [{"type": "url_citation"}]}, Shown("a", fault=ODD)),
        ({"content": "a", "citations": [{"text": "b"}]}, Shown("a", fault=UNKNOWN)),
        ({"content": "a", "Content": "b"}, Shown("a", fault=UNKNOWN)),
        ({"content": "\ud800"}, Shown(fault=ODD)),
        ("a", Shown("a", fault=ODD)),
        ([{"content": "a"}], Shown(fault=ODD)),
        (None, Shown()),
        ({}, Shown()),
    ],
)
def test_every_field_a_client_shows_is_kept(message: Any, expected: Shown) -> None:
    assert of({"message": message}, "message") == of_value(message, "message") == expected


def test_completions_text() -> None:
    assert of({"text": "hi"}, "text") == Shown("hi")
    assert of({}, "text") == of({"text": None}, "text") == of({}, "delta") == of({"delta": None}, "delta") == Shown()
    for odd in (7, ["a"], {"content": "a"}):
        assert of({"text": odd}, "text") == Shown(fault=ODD)


@pytest.mark.parametrize("place", ["text", "message", "delta"])
def test_what_stands_where_clients_of_the_endpoint_do_not_look(place: Place) -> None:
    said: dict[Place, Any] = {"text": "a", "message": {"content": "a"}, "delta": {"content": "a"}}
    assert of({place: said[place]}, place) == Shown("a")
    for other in said.keys() - {place}:
        assert of({place: said[place], other: None}, place) == Shown("a")
        assert of({place: said[place], other: said[other]}, place) == Shown("a", fault=ODD)
        assert of({other: said[other]}, place) == Shown(fault=ODD)
    assert of({place: said[place], "matched": 7, "more": {"x": None}}, place) == Shown("a")
    assert of({place: said[place], "countersign": {"verdict": "pass"}}, place) == Shown("a")
    assert of({place: said[place], "output": "b"}, place) == Shown("a", fault=UNKNOWN)


def test_calls_stand_in_order_or_have_their_index() -> None:
    second = {**CALL, "index": 1}
    bare = {"function": CALL["function"]}
    called = ("f", '{"a"')
    for calls, whole, streamed in (
        ([bare, bare], "", ODD),
        ([CALL, second], "", ""),
        ([CALL, CALL], ODD, ""),
        ([second, CALL], ODD, ""),
    ):
        found = of({"message": {"tool_calls": calls}}, "message")
        assert (found.calls, found.fault) == (((0, *called), (1, *called)), whole)
        assert of({"delta": {"tool_calls": calls}}, "delta").fault == streamed


@pytest.mark.parametrize(
    "spelled",
    [
        b'{"content":"EVIL","content":"a"}',
        b'{ "content" : "EVIL", "\\u0063ontent" : "a" }',
        b'{"content":null,"tool_calls":[{"index":0,"function":{"name":"EVIL"},"function":{"name":"a"}}]}',
        b'{"content":null,"tool_calls":[{"index":0,"function":{"name":"EVIL","name":"a"}}]}',
        b'{"tool_calls":[],"content":"a","tool_calls":[]}',
        b'{"reasoning":"b","content":"a","reasoning":null}',
    ],
)
def test_a_name_twice(spelled: bytes) -> None:
    for place in ("message", "delta"):
        assert shown({place: Raw(spelled)}, place).fault == ODD
    assert any_repeats([b'{"content":"a"}', spelled])
    assert not any_repeats([b'{"content":"a"}', b'{"content":"b"}'])


@given(st.lists(st.tuples(st.sampled_from(["role", "content", "reasoning", "x"]), st.none() | st.text()), max_size=4))
def test_what_passes_as_plain_names_nothing_twice(fields: list[tuple[str, str | None]]) -> None:
    spelled = b"{%b}" % b",".join(json.dumps(name).encode() + b":" + json.dumps(text).encode() for name, text in fields)
    assert repeats(spelled) == (len(dict(fields)) < len(fields))


def test_deltas_add_up() -> None:
    transcript = Transcript()
    assert not transcript
    for said in (
        Shown("a", "r", ((1, "g", ""), (0, "f", "{"))),
        Shown("b", "s", ((0, "", "}"),)),
    ):
        transcript.add(said)
    assert not transcript.torn
    assert (transcript.text, transcript.reasoning) == ("ab", "rs")
    assert transcript.tool_calls == (("f", "{}"), ("g", ""))


def test_reasoning_has_one_name_or_is_the_same_under_both() -> None:
    for parts, reasoning, torn in (
        ((Shown(older="r"), Shown(older="s")), "rs", False),
        ((Shown("", "r", older="r"), Shown("", "s", older="s")), "rs", False),
        ((Shown("", "r"), Shown(older="s")), "r", True),
    ):
        transcript = Transcript()
        for part in parts:
            transcript.add(part)
        assert transcript
        assert (transcript.reasoning, transcript.torn) == (reasoning, torn)


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, False),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, True),
        ({"response_format": {"type": "structural_tag", "structures": [], "triggers": []}}, True),
        ({"structured_outputs": {"regex": "a+"}}, True),
        ({"structured_outputs": None}, False),
        *(({f"guided_{kind}": "x"}, True) for kind in ("json", "regex", "choice", "grammar")),
        ({"guided_json": None}, False),
        ({"tools": [TOOL]}, False),
        ({"tools": [TOOL], "tool_choice": "auto"}, False),
        ({"tools": [TOOL], "tool_choice": "none"}, False),
        ({"tools": [TOOL], "tool_choice": "required"}, True),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, True),
    ],
)
def test_masked_logprobs_are_expected_only_of_a_grammar(fields: dict[str, Any], grammar: bool) -> None:
    backend = BackendSettings.model_validate({"name": "b", "url": "http://b", "model": "m"})
    body = json.dumps({"model": "m", "messages": [], **fields}).encode()
    assert (
        prepare(Body.read("chat", body), ModelSettings.model_validate({}), backend, seed=1).sampling.grammar is grammar
    )


@pytest.mark.parametrize("recording", [one for one in ANSWERS if one.tokenizer is not None], ids=label)
def test_recorded_texts_are_what_their_ids_spell(recording: Recording) -> None:
    assert recording.tokenizer is not None
    spelling = TokenizerSpelling.load(recording.tokenizer)
    _, tap = recording.tap()
    for evidence in tap.evidence(id="1", model="m"):
        check = structure.check(evidence, eos_token_ids=(2,), max_model_len=2048, spelling=spelling)
        assert check.metrics["text_compared"] == 1
        assert "text" not in check.reason
        assert "stop" not in check.reason
        assert check.result != "reject"


@pytest.mark.parametrize(
    "odd", [{"\ud800": 1}, {"content": {"\ud800": 1}}, {"tool_calls": [{"\ud800": 1}]}, {"role": "\ud800"}]
)
@pytest.mark.parametrize("whole", [False, True])
def test_half_a_character_anywhere_breaks_nothing(odd: dict[str, Any], whole: bool) -> None:
    """Even where the rest of it is no JSON either."""
    place: Place = "message" if whole else "delta"
    said = of({place: {"content": "a", "x": float("nan")} | odd}, place)
    assert said.text in ("a", "")
