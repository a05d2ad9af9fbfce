"""What the tap keeps of what a choice shows, and which requests it marks as bound by a grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policies import structure
from policies.settings import BackendSettings, ModelSettings
from proxy.relay.body import Body
from proxy.tap import prepare
from proxy.tap.rawjson import read_object
from proxy.tap.shown import Shown, Transcript, shown
from tests.proxy.tap.test_recorded import ANSWERS, Recording, label
from verifier_pool.tokenizer import TokenizerSpelling

CALL = {"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def of(choice: dict[str, Any], name: str) -> Shown:
    fields = read_object(json.dumps(choice).encode())
    assert fields is not None
    return shown(fields, name)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "hi"}, Shown("hi")),
        ({"content": None, "refusal": "no"}, Shown("no")),
        ({"content": "a", "reasoning": "r", "reasoning_content": "r"}, Shown("a", "r")),
        ({"reasoning": "r", "reasoning_content": "s"}, Shown("", "rs")),
        ({"tool_calls": [CALL]}, Shown("", "", ((0, "f", '{"a"'),))),
        ({"function_call": {"name": "f", "arguments": "{}"}}, Shown("", "", ((-1, "f", "{}"),))),
        ({"content": "a", "tool_calls": 7}, Shown("a")),
        ({"content": 7}, Shown()),
    ],
)
def test_every_field_a_client_shows_is_kept(message: dict[str, Any], expected: Shown) -> None:
    assert of({"message": message}, "message") == expected


def test_completions_text() -> None:
    assert of({"text": "hi"}, "delta") == Shown("hi")
    assert of({"text": 7}, "delta") == of({}, "delta") == Shown()


def test_deltas_add_up() -> None:
    transcript = Transcript()
    assert not transcript
    for said in (
        Shown("a", "r", ((1, "g", ""), (0, "f", "{"))),
        Shown("b", "s", ((0, "", "}"),)),
    ):
        transcript.add(said)
    assert (transcript.text, transcript.reasoning) == ("ab", "rs")
    assert transcript.tool_calls == (("f", "{}"), ("g", ""))


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
