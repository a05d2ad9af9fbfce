"""No parsed answer takes more than about linear time to judge, however it was made up."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from policies import _parsed
from policies._effort import Effort, TooMuchError
from tests.policies.test_delivered import answer
from tests.support.pace import pace

SECONDS = 20.0
"""What took minutes takes two or three, on a machine that does nothing else."""
MANY = 4096
CALL = ("weather", '{"a":1}')
WRITTEN = '{"name":"weather","arguments":{"a":1}}'
TAGGED = f"<tool_call>{WRITTEN}</tool_call>"
MARKUP = _parsed.Markup(re.compile(r"<think>|</?[\w:|-]{1,40}/?>"), re.compile("<think>"))

MADE_UP: dict[str, tuple[str, dict[str, Any]]] = {
    "lists in lists before every call": (("[" * 120 + "1" + "]" * 120 + WRITTEN) * MANY, {"tool_calls": [CALL] * MANY}),
    "heads without an end": ("<tool=weather><a>" * 60_000, {"tool_calls": [CALL]}),
    "blanks where a tag should close": ("<tool=weather><a>" + " " * 1_000_000, {"tool_calls": [CALL]}),
    "brackets that never close": ("[{" * 500_000, {"tool_calls": [CALL] * 10}),
    "lines and brackets": ("\n{" * 500_000, {"tool_calls": [CALL] * 10}),
    "a long argument": (
        WRITTEN * 20_000,
        {"tool_calls": [("weather", json.dumps({"a": "x" * 4_000_000}))], "finish_reason": "length"},
    ),
    "a long key": (WRITTEN * 20_000, {"tool_calls": [("weather", json.dumps({"x" * 4_000_000: 1}))]}),
    "a long name": (WRITTEN * 20_000, {"tool_calls": [("w" * 4_000_000, "{}")], "finish_reason": "length"}),
    "a cut call that repeats itself": (
        '{"name":"weather","arguments":' * 40_000,
        {"tool_calls": [("weather", '{"name":"weather","arguments":' * 39_000)], "finish_reason": "length"},
    ),
    "content in as many pieces as calls": (
        ("q" + TAGGED) * MANY + "z" * 1_000_000,
        {"tool_calls": [CALL] * MANY, "text": "q" * MANY + "zx" * 500_000},
    ),
    "content that nearly stands everywhere": ("ab" * 2_000_000, {"text": "b" * 4_000_000}),
    "reasoning that stands everywhere": ("r " * 2_000_000, {"reasoning": "r"}),
}


@pytest.mark.parametrize("kind", MADE_UP)
def test_what_is_made_up_is_given_up_in_time(kind: str) -> None:
    text, fields = MADE_UP[kind]
    fields = {"text": "x", **fields}
    evidence = answer([5], fields.pop("text"), **fields)
    began = time.thread_time()
    assert not _parsed.made_of(evidence, text, MARKUP, finished=True)
    assert time.thread_time() - began < SECONDS * pace()


@pytest.mark.parametrize(("calls", "content"), [(MANY, ""), (300, "x")])
def test_many_calls_are_found(calls: int, content: str) -> None:
    evidence = answer([5], content * calls, tool_calls=[CALL] * calls)
    assert _parsed.made_of(evidence, (TAGGED + content) * calls, MARKUP, finished=True)


def test_effort_ends() -> None:
    effort = Effort(1000)
    effort.spend(1_000_000)
    with pytest.raises(TooMuchError):
        effort.spend(100_000_000)
