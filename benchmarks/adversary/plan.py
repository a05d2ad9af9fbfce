"""What `countersign attack run` asks: prompts of its own, and every way of asking in turn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.adversary.base import Cheat

QUESTIONS = (
    "Explain how a lock on a canal lifts a boat.",
    "Describe the smell and the sounds of a forest after rain.",
    "What should a small museum do to attract visitors?",
    "Write a short story about a baker who cannot taste.",
    "Why do some metals rust while others do not?",
    "Give advice to somebody who moves to another country.",
    "How does a suspension bridge carry its weight?",
    "Describe a night train and the people on it.",
    "What is the difference between a virus and a bacterium?",
    "Tell a tale about a shepherd and a wolf who talk.",
    "How do farmers protect their fields from frost?",
    "Explain what a budget is to a teenager.",
    "Describe how glass is made.",
    "Why did people build walls around their towns?",
    "Write a letter to a friend about a lost umbrella.",
    "How does a pendulum clock keep time?",
    "What does a good teacher do on the first day?",
    "Describe an island that nobody has mapped.",
    "Explain why the moon shows phases.",
    "How would you organise a street festival?",
)
SHORT_QUESTIONS = (
    "Answer with one word: what is the capital of France?",
    "Say hello.",
    "Answer with one word: which colour is grass?",
    "What is two plus two? Give the number only.",
    "Name one animal that can fly, and nothing else.",
    "Reply with yes or no: is ice cold?",
    "Thank me in one short sentence.",
    "Name a fruit, in one word.",
)
_PLACES = ("harbour", "mill", "orchard", "chapel", "quarry", "market", "library", "lighthouse", "bakery", "garden")
_PEOPLE = ("Mara", "Jonas", "Elif", "Pavel", "Ines", "Tomas", "Greta", "Amir", "Lucia", "Owen")
_DEEDS = (
    "repaired the roof before the storm came",
    "counted the barrels twice and found one missing",
    "planted thirty young trees along the path",
    "hid a letter behind the oldest stone",
    "sold a grey horse for less than it was worth",
    "painted the doors green in a single night",
    "learned to play the organ from a stranger",
    "drew a map that everybody else thought wrong",
)
LONG_SENTENCES = 60
"""Sentences of a long prompt, about 15 tokens each."""


@dataclass(frozen=True, slots=True)
class Shot:
    """One request: its path and its body."""

    path: str
    body: dict[str, Any]

    @property
    def stream(self) -> bool:
        """Whether it is streamed."""
        return bool(self.body.get("stream"))


def plan(
    attack: type[Cheat], model: str, responses: int, tokens: int, temperatures: Sequence[float], longest: int | None
) -> list[Shot]:
    """The requests that are to show one attack; the same for every attack of one shape.

    Temperatures and streaming alternate; every fourth request is a completion, and every fifth asks for two choices
    where its temperature allows. `longest` is the model's context, in tokens.
    """
    hot = [value for value in temperatures if value > 0] or [0.8]
    # At temperature 0 a repeated answer is the right one.
    chosen = hot if attack.shape in ("hot", "repeated") else [0.0] if attack.shape == "greedy" else list(temperatures)
    texts = _texts(attack, responses, tokens, longest)
    ways = [(temperature, stream) for stream in (False, True) for temperature in chosen]
    # Repeated prompts are repeated in one and the same way, or they would be other requests.
    period = len(set(texts)) if attack.shape == "repeated" else responses
    turns = [index % period for index in range(responses)]
    return [_shot(text, model, tokens, *ways[turn % len(ways)], turn) for text, turn in zip(texts, turns, strict=True)]


def _shot(text: str, model: str, tokens: int, temperature: float, stream: bool, turn: int) -> Shot:
    body: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": temperature}
    if stream:
        body["stream"] = True
    if temperature > 0 and turn % 5 == 4:
        body["n"] = 2
    if turn % 4 == 3:
        return Shot("/v1/completions", body | {"prompt": f"Question: {text}\nAnswer:"})
    return Shot("/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]})


def _texts(attack: type[Cheat], responses: int, tokens: int, longest: int | None) -> list[str]:
    if attack.shape == "long":
        # About four characters and fifteen tokens; room for the answer and the chat template.
        room = LONG_SENTENCES if longest is None else min(LONG_SENTENCES, max(4, (longest - tokens - 200) // 18))
        return [long_text(index, room) for index in range(responses)]
    if attack.shape == "repeated":
        distinct = max(1, responses // 4)
        return [QUESTIONS[index % distinct % len(QUESTIONS)] for index in range(responses)]
    pool = SHORT_QUESTIONS if attack.shape == "short" else QUESTIONS
    return [pool[index % len(pool)] for index in range(responses)]


def long_text(seed: int, sentences: int) -> str:
    """A chronicle and a question about its middle."""
    pick = random.Random(seed).choice
    told = [
        f"In the year {1700 + 3 * at}, {pick(_PEOPLE)} of the {pick(_PLACES)} {pick(_DEEDS)}."
        for at in range(sentences)
    ]
    middle = told[sentences // 2].split(",")[0]
    return f"Here is a chronicle. {' '.join(told)}\n\nTell me what happened {middle[0].lower()}{middle[1:]} and after."
