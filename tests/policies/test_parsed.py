"""Parsed answers: honest ones are found in their text, and no edit of one is."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies._parsed import Markup, made_of
from policies.evidence import Evidence, Sampling

TAG = re.compile(r"</?[\w:|-]{1,40}/?>|<\|[^|]*\|>|<｜[^｜]*｜>|\[TOOL_CALLS\]|\[ARGS\]")
ADDED = re.compile(r"</?think>|<\|[^|]*\|>|<｜[^｜]*｜>|\[TOOL_CALLS\]|\[ARGS\]")
MARKUP = Markup(TAG, ADDED)
SAID = "I will NOT delete the production data. Nothing is lost."
ARGUMENTS: dict[str, Any] = {
    "from": "alice",
    "to": "bob",
    "amount": 100,
    "fee": 5,
    "dry_run": True,
    "force": False,
    "note": "rent, {May}",
}
OBJECT = json.dumps(ARGUMENTS)


def tags(parameter: str, value: str, closed: str) -> str:
    """Every argument between tags."""
    words = {True: "true", False: "false"}
    return "\n".join(
        parameter.format(key) + value + str(words.get(item, item) if isinstance(item, bool) else item) + closed
        for key, item in ARGUMENTS.items()
    )


FORMS = {
    "hermes": f'<tool_call>\n{{"name": "transfer", "arguments": {OBJECT}}}\n</tool_call>',
    "llama": f'<|python_tag|>{{"name": "transfer", "parameters": {OBJECT}}}',
    "list": f'[TOOL_CALLS][{{"name": "transfer", "arguments": {OBJECT}}}]',
    "mistral": f"[TOOL_CALLS]transfer[ARGS]{OBJECT}",
    "deepseek": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>transfer\n```json\n{OBJECT}\n```<｜tool▁call▁end｜>",
    "kimi": f"<|tool_call_begin|>functions.transfer:0<|tool_call_argument_begin|>{OBJECT}<|tool_call_end|>",
    "function": f"<function=transfer>{OBJECT}</function>",
    "harmony": f"<|channel|>commentary to=functions.transfer <|constrain|>json<|message|>{OBJECT}<|call|>",
    "qwen-coder": "<tool_call>\n<function=transfer>\n"
    + tags("<parameter={}>\n", "", "\n</parameter>")
    + "\n</function>\n</tool_call>",
    "glm": "<tool_call>transfer\n" + tags("<arg_key>{}</arg_key>\n<arg_value>", "", "</arg_value>") + "\n</tool_call>",
    "invoke": '<minimax:tool_call>\n<invoke name="transfer">\n'
    + tags('<parameter name="{}">', "", "</parameter>")
    + "\n</invoke>\n</minimax:tool_call>",
}


def answer(text: str, *calls: tuple[str, Any], reasoning: str = "", finish: str = "tool_calls") -> Evidence:
    return Evidence(
        id="",
        endpoint="chat",
        backend="b",
        model="m",
        sampling=Sampling(),
        text=text,
        reasoning=reasoning,
        tool_calls=tuple((name, given if isinstance(given, str) else json.dumps(given)) for name, given in calls),
        finish_reason=finish,
        request=b"{}",
    )


def held(evidence: Evidence, text: str, *, opened: bool = False, finished: bool = True, named: str = "") -> bool:
    return made_of(evidence, text, Markup(TAG, ADDED, opened), finished=finished, named=named)


def edits(arguments: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a call could be turned into."""
    swapped = arguments | {"from": arguments["to"], "to": arguments["from"]}
    yield "two values swapped", swapped
    yield "two numbers swapped", arguments | {"amount": 5, "fee": 100}
    yield "flags turned", arguments | {"dry_run": False, "force": True}
    yield "true is not 1", arguments | {"dry_run": 1}
    yield "a string is no number", arguments | {"to": 100}
    yield "words of the content", arguments | {"to": "production"}
    yield "another note", arguments | {"note": "rent"}
    for key in arguments:
        yield f"{key} dropped", {name: value for name, value in arguments.items() if name != key}
        renamed = {("data" if name == key else name): value for name, value in arguments.items()}
        yield f"{key} renamed", renamed
    yield "all dropped", {}
    yield "one more", arguments | {"data": "production"}
    yield "nested", {"arguments": arguments}


@pytest.mark.parametrize("form", FORMS)
def test_an_honest_call_is_found_in_every_known_form(form: str) -> None:
    text = f"{SAID}\n{FORMS[form]}"
    assert held(answer(SAID, ("transfer", ARGUMENTS)), text)
    assert held(answer(SAID + "\n", ("transfer", ARGUMENTS)), text + "<|im_end|>")
    assert held(answer("", ("transfer", ARGUMENTS)), FORMS[form])
    twice = f"{SAID}\n{FORMS[form]}\n{FORMS[form]}"
    assert held(answer(SAID, *[("transfer", ARGUMENTS)] * 2), twice)
    thought = answer(SAID, ("transfer", ARGUMENTS), reasoning="Pay?")
    assert held(thought, f"<think>\nPay?\n</think>\n\n{text}")
    assert held(thought, f"Pay?</think>{text}", opened=True)


@pytest.mark.parametrize("form", FORMS)
def test_no_edited_call_is(form: str) -> None:
    text = f"{SAID}\n{FORMS[form]}"
    for what, edited in edits(copy.deepcopy(ARGUMENTS)):
        assert not held(answer(SAID, ("transfer", edited)), text), what
    for name in ("delete", "trans", "t", "", "a", "from"):
        assert not held(answer(SAID, (name, ARGUMENTS)), text)
        assert not held(answer(SAID, (name, "{}")), text)
    assert not held(answer(SAID, *[("transfer", ARGUMENTS)] * 2), text)
    assert not held(answer(SAID, ("transfer", ARGUMENTS), ("transfer", "{}")), text)
    assert not held(answer(SAID), text)
    assert not held(answer(SAID, ("transfer", ARGUMENTS)), f"{text}\n{FORMS[form]}")
    assert not held(answer(SAID, ("transfer", OBJECT[:-10])), text)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "said",
    [
        *("I will delete the production data. Nothing is lost.", "I will NOT delete the production data.", ""),
        *("Nothing is lost.", "Nothing is lost. I will NOT delete the production data.", "I will NOT", "transfer"),
        *(SAID + " Really.", SAID + SAID, SAID.lower(), SAID.replace(" NOT", "not")),
    ],
)
def test_no_edited_content_beside_a_call_is(form: str, said: str) -> None:
    for text in (f"{SAID}\n{FORMS[form]}", f"{FORMS[form]}\n{SAID}", f"<think>Hm.</think>{SAID}\n{FORMS[form]}"):
        for reasoning in ("", "Hm.", SAID, "NOT"):
            assert not held(answer(said, ("transfer", ARGUMENTS), reasoning=reasoning), text)


@pytest.mark.parametrize("form", ["llama", "list", "mistral", "function", "kimi"])
def test_an_example_of_a_call_amid_content_is_none(form: str) -> None:
    example = re.sub(r"<[^<>]*>|\[TOOL_CALLS\]|\[ARGS\]", "", FORMS[form])
    text = f"You could say {example}. Or not."
    assert not held(answer("You could say. Or not.", ("transfer", ARGUMENTS)), text)
    assert not held(answer("You could say . Or not.", ("transfer", ARGUMENTS)), text)
    assert not held(answer("Say", ("transfer", "{}")), "Say <b>transfer</b>")
    assert not held(answer("Say", ("transfer", "{}")), "Say transfer {}")


def test_words_between_calls_and_in_between_tags_are_not_markup() -> None:
    call = FORMS["hermes"]
    one = answer("Use bleach.", ("transfer", ARGUMENTS))
    assert held(one, f"Use bleach.{call}")
    for text in (
        "Use <b>no</b> bleach.",
        "Use <no> bleach.",
        "Use final bleach.",
        "Use bleach. function",
        "no Use bleach.",
    ):
        assert not held(one, text + call), text
        assert not held(one, call + text), text
    for text in ("<a>7</a>", "<no>7", "7<no>"):
        assert not held(answer("7", finish="stop"), text)
    two = answer("", *[("transfer", ARGUMENTS)] * 2)
    assert held(two, f"{call};\n{call}")
    assert not held(two, f"{call} never {call}")


def test_reasoning_and_content_do_not_change_places() -> None:
    text = "<think>One.</think>Two."
    assert held(answer("Two.", reasoning="One.", finish="stop"), text)
    for shown in (
        answer("One.", reasoning="Two.", finish="stop"),
        answer("", reasoning="One.Two.", finish="stop"),
        answer("", reasoning="One.</think>Two.", finish="stop"),
        answer("wo.", reasoning="One.", finish="stop"),
        answer("Two.", reasoning="One", finish="stop"),
    ):
        assert not held(shown, text)
        assert not held(shown, "One.</think>Two.", opened=True)
    untold = answer("", reasoning="I will not.", finish="stop")
    assert not held(untold, "I will not.")
    assert held(untold, "I will not.", opened=True)
    assert not held(answer("delete", reasoning="I will NOT", finish="stop"), "I will NOT delete", opened=True)
    assert not held(answer("", ("transfer", ARGUMENTS), reasoning=SAID), SAID + FORMS["hermes"])


def test_harmonys_channels_are_markup_beside_their_tags_only() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert held(answer("Yes.", reasoning="Hm.", finish="stop"), text)
    assert not held(answer("Hm.", reasoning="Yes.", finish="stop"), text)
    words = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>The final is no.<|end|>"
    )
    assert held(answer("The final is no.", reasoning="Hm.", finish="stop"), words)
    assert not held(answer("The is no.", reasoning="Hm.", finish="stop"), words)


def test_a_forced_function_needs_no_name_and_no_other_function_does_without() -> None:
    assert held(answer("", ("transfer", ARGUMENTS)), OBJECT, named="transfer")
    assert not held(answer("", ("delete", ARGUMENTS)), OBJECT, named="transfer")
    assert not held(answer("", ("transfer", ARGUMENTS)), OBJECT)
    assert not held(answer("", ("transfer", ARGUMENTS | {"to": "eve"})), OBJECT, named="transfer")


def test_a_call_that_is_cut_off_is_shown_as_far_as_it_came() -> None:
    text = SAID + '<tool_call>\n{"name": "transfer", "arguments": {"from": "alice", "to": "bo'
    begun = '{"from": "alice", "to": "b'
    assert held(answer(SAID, ("transfer", begun), finish="length"), text)
    assert not held(answer(SAID, ("transfer", begun)), text)
    assert not held(answer(SAID, ("transfer", begun.replace("alice", "eve")), finish="length"), text)
    assert not held(answer(SAID[:-5], ("transfer", begun), finish="length"), text)
    assert held(answer(SAID, finish="length"), SAID + '<tool_call>\n{"name": "tr')
    assert not held(answer(SAID[:-1], finish="length"), SAID + '<tool_call>\n{"name": "tr')


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.floats(-9, 9) | st.text('ab c{}"\\<>\nü', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text("abcd", max_size=4), VALUES, max_size=4), VALUES, st.booleans())
def test_any_arguments_are_found_and_any_others_are_not(arguments: dict[str, Any], other: Any, ascii: bool) -> None:
    text = "Well.<tool_call>" + json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii) + "</tool_call>"
    assert held(answer("Well.", ("f", arguments)), text)
    changed = arguments | {"d": other}
    if json.dumps(changed, sort_keys=True) != json.dumps(arguments, sort_keys=True):
        assert held(answer("Well.", ("f", changed)), text) is _alike(changed, arguments)


def _alike(one: Any, two: Any) -> bool:
    return json.dumps(_floats(one), sort_keys=True) == json.dumps(_floats(two), sort_keys=True)


def _floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_floats(item) for item in value]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value + 0.0 if number else value


@pytest.mark.parametrize(
    "text",
    [
        "{" * 50_000,
        "[" * 50_000,
        "<a>" * 20_000,
        '{"a":' * 20_000,
        "```json" * 5_000,
        "[1," * 300 + "1" + "," * 200_000,
        "[" * 900 + "1," * 200_000 + "1" + "]" * 900,
    ],
)
def test_hostile_texts_are_read_in_time(text: str) -> None:
    assert not held(answer("x", ("transfer", ARGUMENTS), reasoning="y"), text)
    assert not held(answer("x", ("transfer", ARGUMENTS)), text)
