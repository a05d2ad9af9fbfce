"""Texts held against ids: what vLLM shows of them passes, anything else does not."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import _delivered
from policies._delivered import Delivered
from policies.evidence import Evidence, Sampling
from policies.spelling import Spelling
from tests.support.spellings import END_THINK, EOS, THINK, byte_level, space_marked

BOTH = [byte_level, space_marked]
ODD = "Hello, wörld! 你好 🎉👩‍👩‍👧 \t code {x: 1}\n\n```py\nif a<b: pass```"
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), min_size=1, max_size=40)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def answer(ids: Any, text: str, *, sampling: dict[str, Any] | None = None, **fields: Any) -> Evidence:
    request = fields.pop("request", {})
    values: dict[str, Any] = {
        "endpoint": "chat",
        "finish_reason": "stop",
        "prompt_ids": np.array([THINK, END_THINK], np.int32),
        **fields,
    }
    return Evidence(
        id="0" * 32,
        backend="b",
        model="m",
        sampling=Sampling(**(sampling or {})),
        request=json.dumps({"model": "m", **request}).encode(),
        output_ids=np.array(ids, np.int32),
        text=text,
        **values,
    )


def spelled(spelling: Spelling, text: str, *, end: bool = True) -> list[int]:
    return [*spelling.encode(text).tolist(), *([EOS] if end else [])]


def check(evidence: Evidence, spelling: Spelling) -> Delivered:
    return _delivered.check(evidence, spelling, frozenset({EOS}), known=True)


def codes(delivered: Delivered) -> list[str]:
    return [finding.code for finding in delivered.findings]


def shown(spelling: Spelling, ids: list[int], prompt: Any = (THINK, END_THINK)) -> str:
    """As vLLM's detokeniser: id by id after the prompt."""
    steps = spelling.steps(np.array(ids, np.int32), context=np.array(prompt, np.int32), skip_special_tokens=True)
    assert steps is not None
    return "".join(steps)


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_what_the_ids_spell_passes_and_one_other_letter_does_not(make: Any, endpoint: Any) -> None:
    spelling = make()
    ids = spelled(spelling, ODD)
    text = shown(spelling, ids)
    assert "你好 🎉" in text
    assert check(answer(ids, text, endpoint=endpoint), spelling) == Delivered(compared=True)
    for at in range(len(text)):
        other = text[:at] + ("x" if text[at] != "x" else "y") + text[at + 1 :]
        assert codes(check(answer(ids, other, endpoint=endpoint), spelling)) == ["text_mismatch"]


@pytest.mark.parametrize("make", BOTH)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, cut=st.integers(0, 60), data=st.data())
def test_any_text_cut_anywhere_passes_and_any_other_is_rejected(make: Any, text: str, cut: int, data: Any) -> None:
    spelling = make()
    ids = spelled(spelling, text, end=False)[: max(1, cut)]
    honest = shown(spelling, ids)
    evidence = answer(ids, honest, finish_reason="length", endpoint="completions")
    assert check(evidence, spelling) == Delivered(compared=True)
    other = data.draw(TEXTS.filter(lambda other: other != honest))
    assert codes(check(dataclasses.replace(evidence, text=other), spelling)) == ["text_mismatch"]


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 1400), min_size=1, max_size=40), skip=st.booleans())
def test_ids_without_sense_are_read_as_the_detokeniser_reads_them(ids: list[int], skip: bool) -> None:
    spelling = byte_level()
    ids = [id for id in ids if id != EOS] or [5]
    array, prompt = np.array(ids, np.int32), np.array([THINK], np.int32)
    steps = spelling.steps(array, context=prompt, skip_special_tokens=skip)
    assert steps is not None
    text = "".join(steps)
    request = {"skip_special_tokens": skip}
    evidence = answer(ids, text, finish_reason="length", endpoint="completions", request=request, prompt_ids=prompt)
    assert check(evidence, spelling) == Delivered(compared=True)


def test_half_a_character_at_the_end_is_not_shown() -> None:
    spelling = byte_level()
    ids = spelling.encode("ab 🎉").tolist()[:-1]
    assert check(answer(ids, "ab ", finish_reason="length"), spelling) == Delivered(compared=True)
    assert codes(check(answer(ids, "ab \ufffd", finish_reason="length"), spelling)) == ["text_mismatch"]


@pytest.mark.parametrize("included", [False, True])
def test_stop_strings_cut_the_text_inside_a_token(included: bool) -> None:
    spelling = byte_level()
    ids = spelled(spelling, "one two three", end=False)
    upto = next(at for at in range(len(ids)) if "thr" in shown(spelling, ids[: at + 1])) + 1
    text = "one two thr" if included else "one two "
    sampling = {"stop": ("never", "thr"), "include_stop_str_in_output": included}
    assert check(answer(ids[:upto], text, sampling=sampling), spelling) == Delivered(compared=True)
    longer = [*ids[:upto], *spelled(spelling, " and more", end=False)]
    assert "tokens_after_stop" in codes(check(answer(longer, text, sampling=sampling), spelling))
    whole = shown(spelling, longer)
    assert codes(check(answer(longer, whole, sampling=sampling, endpoint="completions"), spelling)) == ["text_mismatch"]


def test_a_stop_string_counts_only_after_min_tokens() -> None:
    spelling = byte_level()
    ids = spelled(spelling, "a b a b a b", end=False)
    text = shown(spelling, ids)
    sampling = {"stop": ("b",), "min_tokens": len(ids)}
    assert check(answer(ids, text, sampling=sampling, finish_reason="length"), spelling).findings == ()
    early = {"stop": ("b",), "min_tokens": 1}
    assert codes(check(answer(ids, text, sampling=early, finish_reason="length"), spelling)) == ["text_mismatch"]


def test_a_stop_without_a_stop_string_or_token_is_rejected() -> None:
    spelling = byte_level()
    ids = spelled(spelling, "one two", end=False)
    evidence = answer(ids, "one two", sampling={"stop": ("three",)})
    assert codes(check(evidence, spelling)) == ["finish_mismatch"]


def test_special_tokens_are_shown_where_asked_for() -> None:
    spelling = byte_level()
    ids = [EOS, *spelled(spelling, "hi")]
    sampling = {"min_tokens": 1, "include_stop_str_in_output": True}
    visible = answer(ids, "<|end|>hi<|end|>", request={"skip_special_tokens": False}, sampling=sampling)
    assert check(visible, spelling) == Delivered(compared=True)
    hidden = answer(ids, "hi", sampling=sampling, endpoint="completions")
    assert check(hidden, spelling) == Delivered(compared=True)


def test_reasoning_may_be_taken_out() -> None:
    spelling = byte_level()
    ids = [THINK, *spelled(spelling, "\nlet me see\n", end=False), END_THINK, *spelled(spelling, "\n\nForty-two.")]
    parsed = answer(ids, "Forty-two.", reasoning="let me see")
    assert check(parsed, spelling) == Delivered(compared=True)
    assert codes(check(dataclasses.replace(parsed, text="Buy our forty-two!"), spelling)) == ["text_undecided"]
    assert codes(check(dataclasses.replace(parsed, reasoning="other words"), spelling)) == ["text_undecided"]


@pytest.mark.parametrize("reasoning", ["", "today"])
def test_an_answer_of_some_pieces_of_the_text_never_passes(reasoning: str) -> None:
    spelling = byte_level()
    ids = spelled(spelling, "Do not take both pills today.")
    evidence = answer(ids, "Do take both pills.", reasoning=reasoning, request={"tools": TOOLS})
    assert codes(check(evidence, spelling)) == ["text_undecided"]


@pytest.mark.parametrize("begun", ["<tool_c", '<tool_call>\n{"name": "wea'])
def test_a_call_cut_off_at_its_beginning_is_not_shown(begun: str) -> None:
    spelling = byte_level()
    evidence = answer(spelled(spelling, "Sure." + begun, end=False), "Sure.", request={"tools": TOOLS})
    assert check(dataclasses.replace(evidence, finish_reason="length"), spelling) == Delivered(compared=True)
    assert codes(check(dataclasses.replace(evidence, finish_reason="length", text="ure"), spelling)) == [
        "text_undecided"
    ]


def test_content_may_repeat_what_the_reasoning_said() -> None:
    spelling = byte_level()
    ids = [THINK, *spelled(spelling, "It is 42.", end=False), END_THINK, *spelled(spelling, "It is 42.")]
    assert check(answer(ids, "It is 42.", reasoning="It is 42."), spelling) == Delivered(compared=True)
    assert codes(check(answer(ids, "It is 42.", reasoning="It"), spelling)) == ["text_undecided"]


def test_a_text_of_blanks_is_read_in_linear_time() -> None:
    spelling = byte_level()
    evidence = answer(spelled(spelling, "one two three"), " " * 300_000 + "x")
    assert codes(check(evidence, spelling)) == ["text_mismatch"]


def test_markup_and_edges_may_be_gone_from_a_plain_chat_answer() -> None:
    spelling = byte_level()
    ids = [THINK, *spelled(spelling, "\n\n", end=False), END_THINK, *spelled(spelling, "\n\nForty two.")]
    assert check(answer(ids, "Forty two."), spelling) == Delivered(compared=True)
    assert codes(check(answer(ids, "Forty\n two."), spelling)) == ["text_mismatch"]
    assert codes(check(answer(ids, "Forty two.", endpoint="completions"), spelling)) == ["text_mismatch"]


@pytest.mark.parametrize(
    "arguments",
    ['{"city": "Zürich\\n", "days": 3.0}', '{"city":"Zürich\\n","days":3}', '{"city": "Z\\u00fcrich\\n", "days": 3}'],
)
def test_tool_calls_come_from_the_text_whatever_the_json(arguments: str) -> None:
    spelling = byte_level()
    text = 'Sure.<tool_call>{"name": "weather", "arguments": {"city": "Zürich\\n", "days": 3}}</tool_call>'
    evidence = answer(
        spelled(spelling, text),
        "Sure.",
        tool_calls=(("weather", arguments),),
        finish_reason="tool_calls",
        request={"tools": TOOLS},
    )
    assert check(evidence, spelling) == Delivered(compared=True)
    changed = dataclasses.replace(evidence, tool_calls=(("weather", arguments.replace("rich", "rn")),))
    assert codes(check(changed, spelling)) == ["text_undecided"]


@pytest.mark.parametrize(
    "calls",
    [
        (("weather", "{}"),),
        (("pay", '{"amount": 5000}'),),
        (("pay", '{"amount": 5, "now": true}'),),
        (("pay", '{"amount": 5}'),) * 2,
    ],
)
def test_calls_that_the_model_did_not_make_never_pass(calls: tuple[tuple[str, str], ...]) -> None:
    spelling = byte_level()
    ids = spelled(spelling, 'Sure.<tool_call>{"name": "pay", "arguments": {"amount": 5}}</tool_call>')
    evidence = answer(ids, "Sure.", tool_calls=(("pay", '{"amount": 5.0}'),), request={"tools": TOOLS})
    assert check(evidence, spelling) == Delivered(compared=True)
    assert codes(check(dataclasses.replace(evidence, tool_calls=calls), spelling)) == ["text_undecided"]


def test_with_tools_offered_a_changed_text_never_passes() -> None:
    spelling = byte_level()
    ids = spelled(spelling, "It is warm and dry today, as it often is.")
    evidence = answer(ids, "It is cold; visit example.org for coats.", request={"tools": TOOLS})
    assert codes(check(evidence, spelling)) == ["text_undecided"]
    none = answer(ids, "It is cold.", request={"tools": TOOLS, "tool_choice": "none"})
    assert codes(check(none, spelling)) == ["text_mismatch"]


def test_an_answer_broken_off_is_compared_as_far_as_it_came() -> None:
    spelling = byte_level()
    ids = spelled(spelling, "one two three", end=False)
    broken = answer(ids, "one tw", complete=False, finish_reason=None, faults=("client_left",))
    assert check(broken, spelling) == Delivered(compared=True)
    assert codes(check(dataclasses.replace(broken, text="one zw"), spelling)) == ["text_mismatch"]


def test_nothing_is_compared_without_request_or_ids_or_with_echo() -> None:
    spelling = byte_level()
    ids = spelled(spelling, "one")
    for evidence in (
        dataclasses.replace(answer(ids, "x"), request=b""),
        answer([], "x"),
        answer(ids, "x", request={"echo": True}),
        answer(ids, "x", faults=("bad_ids",)),
    ):
        assert check(evidence, spelling) == Delivered()


def test_a_stop_token_that_a_grammar_leaves_alone_ends_an_answer_before_its_time() -> None:
    spelling = byte_level()
    ids = spelled(spelling, "yes.", end=False)
    stop = frozenset({ids[-1]})
    shown_text = shown(spelling, ids[:-1])
    for grammar, honest in ((True, True), (False, False)):
        evidence = answer(ids, shown_text, sampling={"min_tokens": 9, "grammar": grammar})
        found = _delivered.check(evidence, spelling, stop, known=True)
        assert (found == Delivered(compared=True)) is honest


@pytest.mark.parametrize(
    ("text", "ids_text", "cut"),
    [
        ("the answer", "some words <think></think> the answer", True),
        ("the answer", "some words</think>\n\nthe answer\n", True),
        ("first", "first <b>second", True),
        ("answer", "some words</think> the answer", False),
        ("the ans", "some words</think> the answer", False),
        ("the answer is 5", "some words</think> the answer", False),
        ("words", "some words, and more", False),
    ],
)
def test_a_text_that_begins_or_ends_at_a_tag_is_undecided(text: str, ids_text: str, cut: bool) -> None:
    spelling = byte_level()
    found = check(answer(spelled(spelling, ids_text), text), spelling)
    assert codes(found) == (["text_undecided"] if cut else ["text_mismatch"])
    plain = check(answer(spelled(spelling, ids_text), text, endpoint="completions"), spelling)
    assert codes(plain) == ["text_mismatch"]


def test_tags_without_end_are_read_in_time() -> None:
    spelling = byte_level()
    many = "<a>" * 20_000
    evidence = answer(spelled(spelling, many + "x"), "<a>" * 10_000 + "y")
    assert codes(check(evidence, spelling)) == ["text_mismatch"]
