"""Requests with options picked at random, by a seed."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.recordings.cases import (
    CALL,
    CITY,
    CLOCKS,
    COUNT,
    GREETING,
    JSON,
    NAMED,
    NUMBER,
    PERSON,
    SCHEMA,
    STRICT,
    WEATHER,
    Case,
    say,
)
from policies.evidence import Endpoint

EMOJI = say("Emoji party 🎉👩‍👩‍👧 日本語")
TAGS = say("Repeat: <think> a </think> b <tool_call> c")
WORDS = ["the", " a", "clock", ".", "1", ", ", "and", "Zü", "🎉", "e", "</think>", "<tool_call>", "{"]
IDS = [2, 4, 28, 30, 198, 253, 260, 282, 284, 339, 357]
BIASES = [(4, 14), (3, 10), (2, 6), (28, 8), (260, -100), (198, 5), (0, 6), (30, 100)]
GRAMMARS: list[dict[str, Any]] = [
    {"structured_outputs": NUMBER},
    {"structured_outputs": {"choice": ["yes", "no", "maybe not"]}},
    {"structured_outputs": {"json": PERSON}},
    {"structured_outputs": {"regex": CALL}},
    {"structured_outputs": {"regex": "(a|b| |\\n)*"}},
    {"structured_outputs": {"grammar": 'root ::= [a-z]+ " " [0-9]+'}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "text"}},
    {"response_format": SCHEMA},
]


def drawn(seed: int) -> Case:
    """One request; the same for the same seed."""
    pick = random.Random(seed)
    chat = pick.random() < 0.75
    fields: dict[str, Any] = {"max_tokens": pick.choice([1, 2, 8, 24, 32])}
    fields |= (
        _chat(pick) if chat else {"prompt": pick.choice(["The 漢字 for", [504, 6376], ["One", "def f(x):\n\t"], "🎉"])}
    )
    if pick.random() < 0.3:
        count = pick.choice([0, 1, 5, 20])
        fields |= {"logprobs": True, "top_logprobs": count} if chat else {"logprobs": count}
    options: list[tuple[float, dict[str, Any]]] = [
        (0.35, {"stop": pick.sample(WORDS, pick.randint(1, 3))}),
        (0.3, {"include_stop_str_in_output": True}),
        (0.2, {"stop_token_ids": pick.sample(IDS, 2)}),
        (0.2, {"ignore_eos": True}),
        (0.2, {"skip_special_tokens": False}),
        (0.15, {"spaces_between_special_tokens": False}),
        (0.25, {"min_tokens": pick.randint(1, fields["max_tokens"])}),
        (0.15, {"bad_words": pick.sample(["the", " a", "and", "clock", ", "], 2)}),
        (0.3, {"logit_bias": {str(id): bias for id, bias in pick.sample(BIASES, pick.randint(1, 3))}}),
        (0.08, {"allowed_token_ids": pick.sample(IDS, pick.randint(1, 9))}),
        (0.15, {"presence_penalty": pick.choice([-1, 0.5, 1.5])}),
        (0.1, {"frequency_penalty": pick.choice([-1, 0.5, 1.5])}),
        (0.06, {"repetition_penalty": 1.2}),
        (0.2, {"top_p": pick.choice([0.5, 0.9, 0.99])}),
        (0.2, {"top_k": pick.choice([1, 5, 30])}),
        (0.1, {"min_p": 0.05}),
        (0.3, pick.choice(GRAMMARS)),
        (0.1, {"seed": pick.choice([0, 7, -1, 2**40, None])}),
        (0.2, {"return_token_ids": True}),
        (0.05, {"repetition_detection": {"max_pattern_size": 8, "min_pattern_size": 1, "min_count": 3}}),
    ]
    for share, option in options:
        if pick.random() < share:
            fields |= option
    fields |= {"temperature": pick.choice([0, 0, 0.3, 1, 1, 1.5, 0.005]), "stream": pick.random() < 0.5}
    if pick.random() < 0.15:
        fields |= {"n": 2, "temperature": fields["temperature"] or 0.7}
    if fields["stream"] and pick.random() < 0.3:
        fields |= {"stream_options": {"include_usage": True}, "stream_interval": pick.choice([1, 2, 7])}
    endpoint: Endpoint = "chat" if chat else "completions"
    return Case(endpoint, f"random {seed}", fields)


def _chat(pick: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"messages": pick.choice([CITY, CLOCKS, COUNT, EMOJI, GREETING, JSON, TAGS])}
    if pick.random() < 0.1:
        begun = {"role": "assistant", "content": pick.choice(["1, 2,", '{"a":', "<think> hm"])}
        fields["messages"] = [*fields["messages"], begun]
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if pick.random() < 0.15:
        fields["include_reasoning"] = False
    if pick.random() < 0.35:
        fields |= {"tools": [pick.choice([WEATHER, STRICT])]}
        fields["tool_choice"] = pick.choice(["auto", "auto", "required", "none", NAMED])
        if pick.random() < 0.3:
            fields["parallel_tool_calls"] = pick.random() < 0.5
    return fields
