"""Requests for every option that bears on what an answer's evidence looks like.

`PLAIN` and `COMPLETIONS` need no more than a tool parser (hermes). `REASONING` needs a reasoning parser and a model
with `<think>` and `</think>` in its vocabulary; `benchmarks.recordings.options.with_tags` makes one of the demo's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from policies.evidence import Endpoint


def say(text: str) -> list[dict[str, str]]:
    """Messages of one turn."""
    return [{"role": "user", "content": text}]


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "weather"}}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "[A-Z][a-z]{2,8}"\}\}\n</tool_call>'
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<a>",
        "content": {"type": "json_schema", "json_schema": {"type": "integer", "maximum": 99}},
        "end": "</a>",
    },
}
CLOCKS, GREETING, COUNT = say("Write about clocks."), say("Say hi."), say("Count from 1 to 30.")
PHONE, JSON, CITY = say("A phone number."), say("A person as JSON."), say("What is the weather in Zürich?")
NUMBER = {"regex": "[0-9]{3}-[0-9]{4}"}
CHOICE = {"choice": ["yes", "no", "maybe not"]}
DIGITS = 'root ::= num " + " num\nnum ::= [0-9] [0-9]'

PLAIN: dict[str, dict[str, Any]] = {
    "plain": {"messages": CLOCKS},
    "many": {"messages": GREETING, "n": 3, "max_tokens": 8},
    "stop": {"messages": say("Count: one, two, three, four, five, six"), "stop": ["ve", "thr", ", s"]},
    "stop-shown": {"messages": COUNT, "stop": ["7", "1"], "include_stop_str_in_output": True},
    "stop-late": {"messages": COUNT, "stop": ["1", " "], "min_tokens": 12},
    "stop-ids": {"messages": CLOCKS, "stop_token_ids": [30, 28, 284]},
    "stop-ids-shown": {"messages": CLOCKS, "stop_token_ids": [30, 28, 284], "include_stop_str_in_output": True},
    "ignore-eos": {"messages": GREETING, "ignore_eos": True, "max_tokens": 32},
    "ignore-eos-stop-id": {"messages": GREETING, "ignore_eos": True, "stop_token_ids": [2], "max_tokens": 32},
    "specials": {"messages": GREETING, "skip_special_tokens": False, "ignore_eos": True, "max_tokens": 32},
    "unspaced": {
        "messages": GREETING,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
        "max_tokens": 32,
    },
    "min": {"messages": GREETING, "min_tokens": 20, "max_tokens": 32},
    "min-max": {"messages": GREETING, "min_tokens": 20, "max_tokens": 20},
    "bad-words": {"messages": CLOCKS, "bad_words": ["the", " clock", "and", "a"]},
    "bias": {"messages": CLOCKS, "logit_bias": {"260": -100, "28": 5, "30": -3, "2": 2}},
    "allowed": {"messages": CLOCKS, "allowed_token_ids": [2, 28, 30, 198, 253, 260, 282, 284, 339, 357]},
    "allowed-one": {"messages": CLOCKS, "allowed_token_ids": [28], "max_tokens": 6},
    "penalties": {"messages": say("Say hi hi hi."), "presence_penalty": 1.2, "frequency_penalty": -0.4},
    "repetition": {"messages": say("Say hi hi hi."), "repetition_penalty": 1.3},
    "repeats": {
        "messages": say("Say hi hi hi."),
        "repetition_detection": {"max_pattern_size": 8, "min_pattern_size": 1, "min_count": 3},
        "logit_bias": {"28": 60},
    },
    "top-p": {"messages": CLOCKS, "top_p": 0.9},
    "top-k": {"messages": CLOCKS, "top_k": 7, "min_p": 0.05},
    "json-object": {"messages": JSON, "response_format": {"type": "json_object"}},
    "json-schema": {"messages": JSON, "response_format": SCHEMA},
    "text-format": {"messages": CLOCKS, "response_format": {"type": "text"}},
    "regex": {"messages": PHONE, "structured_outputs": NUMBER},
    "regex-stop": {"messages": PHONE, "structured_outputs": NUMBER, "stop": ["-"]},
    "regex-min": {"messages": PHONE, "structured_outputs": NUMBER, "stop_token_ids": [30], "min_tokens": 12},
    "regex-ignore-eos": {"messages": PHONE, "structured_outputs": NUMBER, "ignore_eos": True},
    "regex-bias": {"messages": PHONE, "structured_outputs": NUMBER, "logit_bias": {"33": 5}, "presence_penalty": 0.5},
    "regex-top-p": {"messages": PHONE, "structured_outputs": NUMBER, "top_p": 0.8, "top_k": 9},
    "choice": {"messages": say("Yes or no?"), "structured_outputs": CHOICE},
    "choice-min": {"messages": say("Yes or no?"), "structured_outputs": CHOICE, "min_tokens": 8},
    "so-json": {"messages": JSON, "structured_outputs": {"json": PERSON}},
    "so-json-object": {"messages": JSON, "structured_outputs": {"json_object": True}},
    "grammar": {"messages": say("A sum."), "structured_outputs": {"grammar": DIGITS}},
    "tag": {"messages": say("A sum."), "structured_outputs": {"structural_tag": json.dumps(TAG)}},
    "tools-auto": {"messages": CITY, "tools": [WEATHER]},
    "tools-auto-call": {"messages": CITY, "tools": [WEATHER], "structured_outputs": {"regex": CALL}, "max_tokens": 48},
    "tools-auto-two": {
        "messages": CITY,
        "tools": [WEATHER],
        "structured_outputs": {"regex": rf"Well, {CALL}\n{CALL}"},
        "max_tokens": 80,
    },
    "tools-strict": {"messages": CITY, "tools": [STRICT]},
    "tools-single": {"messages": CITY, "tools": [WEATHER], "parallel_tool_calls": False},
    "tools-required": {"messages": CITY, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 40},
    "tools-required-short": {"messages": CITY, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 9},
    "tools-named": {"messages": CITY, "tools": [WEATHER], "tool_choice": NAMED, "max_tokens": 32},
    "tools-named-short": {"messages": CITY, "tools": [WEATHER], "tool_choice": NAMED, "max_tokens": 4},
    "tools-none": {"messages": CITY, "tools": [WEATHER], "tool_choice": "none"},
    "no-reasoning": {"messages": GREETING, "include_reasoning": False},
    "no-reasoning-json": {"messages": JSON, "include_reasoning": False, "response_format": {"type": "json_object"}},
    "continue": {
        "messages": [*say("Count to ten."), {"role": "assistant", "content": "1, 2, 3,"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "half-character": {"messages": say("🎉🎉🎉 repeat this"), "max_tokens": 3},
    "one": {"messages": GREETING, "max_tokens": 1},
    "interval": {"messages": GREETING, "stream_interval": 5},
}
"""Chat."""

_ENDS = {"4": 14}
SUM = say("What is 2+2?")
REASONING: dict[str, dict[str, Any]] = {
    "think": {"messages": SUM, "logit_bias": _ENDS},
    "think-hidden": {"messages": SUM, "logit_bias": _ENDS, "include_reasoning": False},
    "think-json": {"messages": JSON, "logit_bias": _ENDS, "response_format": {"type": "json_object"}},
    "think-schema-hidden": {
        "messages": JSON,
        "logit_bias": _ENDS,
        "include_reasoning": False,
        "response_format": SCHEMA,
        "max_tokens": 48,
    },
    "think-call": {
        "messages": CITY,
        "tools": [WEATHER],
        "logit_bias": _ENDS,
        "structured_outputs": {"regex": CALL},
        "max_tokens": 64,
    },
    "think-required": {"messages": CITY, "tools": [WEATHER], "logit_bias": _ENDS, "tool_choice": "required"},
    "think-named": {"messages": CITY, "tools": [WEATHER], "logit_bias": _ENDS, "tool_choice": NAMED},
    "think-budget": {
        "messages": [*SUM, {"role": "assistant", "content": "<think> Well"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "thinking_token_budget": 5,
    },
    "think-budget-json": {
        "messages": [*SUM, {"role": "assistant", "content": "<think> Well"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "thinking_token_budget": 5,
        "response_format": {"type": "json_object"},
    },
    "think-unused-budget": {"messages": SUM, "thinking_token_budget": 5},
    "think-start": {"messages": SUM, "logit_bias": {"3": 12, "4": 12}},
    "think-never": {"messages": SUM},
    "think-stop": {"messages": SUM, "logit_bias": _ENDS, "stop": [".", " a"]},
    "think-stop-shown": {"messages": SUM, "logit_bias": _ENDS, "stop": [".", " a"], "include_stop_str_in_output": True},
    "think-many": {"messages": SUM, "logit_bias": _ENDS, "n": 2},
    "think-specials": {"messages": SUM, "logit_bias": _ENDS, "skip_special_tokens": False},
}
"""Chat, for a server with a reasoning parser."""

COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "The 漢字 for mountain is"},
    "ids": {"prompt": [504, 6376, 18234]},
    "several": {"prompt": ["Once upon", "def f(x):\n\t"], "n": 2, "max_tokens": 8},
    "stop": {"prompt": "1 2 3 4 5 6", "stop": [" 9", "\n"]},
    "stop-shown": {"prompt": "1 2 3 4 5 6", "stop": [" 9", "\n"], "include_stop_str_in_output": True},
    "stop-ids": {"prompt": "Cats are", "stop_token_ids": [30, 28]},
    "min": {"prompt": "The end.", "min_tokens": 12},
    "ignore-eos": {"prompt": "The end.", "ignore_eos": True},
    "specials": {"prompt": "The end.", "skip_special_tokens": False, "ignore_eos": True},
    "bytes": {"prompt": "x", "allowed_token_ids": list(range(17, 273))},
    "regex": {"prompt": "Call me: ", "structured_outputs": NUMBER},
    "choice": {"prompt": "Yes or no?", "structured_outputs": CHOICE},
    "json": {"prompt": "A person: ", "response_format": {"type": "json_object"}},
    "bias": {"prompt": "A", "logit_bias": {"28": -100}, "bad_words": ["the"]},
}


@dataclass(frozen=True, slots=True)
class Case:
    """One request as a client would send it, without its model."""

    endpoint: Endpoint
    name: str
    fields: dict[str, Any]

    def request(self, *, stream: bool, temperature: float, logprobs: int | None = None, limit: int = 24) -> Case:
        """The case in one form; several choices need a temperature."""
        fields = {"max_tokens": limit, **self.fields, "stream": stream, "temperature": temperature}
        if fields.get("n", 1) > 1 and temperature == 0:
            fields["temperature"] = 0.5
        if logprobs is not None:
            fields |= (
                {"logprobs": True, "top_logprobs": logprobs} if self.endpoint == "chat" else {"logprobs": logprobs}
            )
        return Case(self.endpoint, self.name, fields)


def cases(*, reasoning: bool) -> list[Case]:
    """Every option, for a server without a reasoning parser or for one with. Where one is, all that comes before the
    end of the reasoning is free of grammars."""
    if reasoning:
        return [Case("chat", name, fields) for name, fields in REASONING.items()]
    return [
        *(Case("chat", name, fields) for name, fields in PLAIN.items()),
        *(Case("completions", name, fields) for name, fields in COMPLETIONS.items()),
    ]
