"""Requests: a prompt of its own for each, of about the wanted length, in the words of an endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from tokenizers import Tokenizer

from benchmarks.overhead.cells import Lengths
from benchmarks.overhead.client import Target
from benchmarks.overhead.steps import ASYNC, DIRECT, INLINE, PLAIN

Endpoint = Literal["chat", "completions"]

PATHS: Mapping[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
COUNTED = "counted"
"""Name of the backend behind which bytes are counted."""
LOWEST_ID = 1000
"""Token ids below it are often special ones, or single bytes."""
_SAMPLES = 32
WORDS = (
    "harbour",
    "lantern",
    "river",
    "mountain",
    "garden",
    "winter",
    "letter",
    "window",
    "bridge",
    "market",
    "candle",
)


@dataclass(frozen=True, slots=True)
class Asking:
    """How everybody is asked.

    Attributes:
        model: its name at the backend.
        endpoint: `chat` with words, or `completions` with token ids, which are exactly as long as they should be.
        vocabulary: token ids that exist, for completions.
        temperature: of all requests.
        key: what the backend is asked with, directly; through the proxy the proxy has it.
    """

    model: str
    endpoint: Endpoint = "chat"
    vocabulary: int = 0
    temperature: float = 0.0
    key: str = ""

    def targets(
        self,
        arm: str,
        urls: Mapping[str, str],
        lengths: Sequence[Lengths],
        random: np.random.Generator,
        *,
        counted: bool = False,
    ) -> list[Target]:
        """One request per length, to the arm's place in `urls` (`direct`, `plain`, `proxy`)."""
        place = arm if arm in (DIRECT, PLAIN) else "proxy"
        headers = self._headers(arm)
        if counted and arm != DIRECT:
            headers["x-countersign-backend"] = COUNTED
        url = urls[place] + PATHS[self.endpoint]
        return [Target(arm, url, orjson.dumps(self._body(each, random)), headers) for each in lengths]

    def _headers(self, arm: str) -> dict[str, str]:
        if arm in (ASYNC, INLINE):
            return {"x-countersign-mode": arm}
        return {"authorization": f"Bearer {self.key}"} if arm == DIRECT and self.key else {}

    def _body(self, lengths: Lengths, random: np.random.Generator) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "model": self.model,
            "max_tokens": lengths.answer,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "completions":
            ids = random.integers(min(LOWEST_ID, self.vocabulary // 2), self.vocabulary - 1, lengths.prompt)
            return asked | {"prompt": ids.tolist()}
        return asked | {"messages": [{"role": "user", "content": _text(lengths.prompt, random)}]}


def tokens(path: Path, prompt: int, seed: int) -> int:
    """Tokens that a chat's words take, of which there are as many as a prompt should have tokens: the median of a few,
    by the tokenizer (`tokenizer.json`) of a model's folder."""
    tokenizer, random = Tokenizer.from_file(str(path / "tokenizer.json")), np.random.default_rng(seed)
    counts = [len(tokenizer.encode(_text(prompt, random), add_special_tokens=False)) for _ in range(_SAMPLES)]
    return round(float(np.median(counts)))


def _text(prompt: int, random: np.random.Generator) -> str:
    # The first words differ from all others', so that no cache of prefixes has the prompt already.
    words = [f"{random.integers(2**31):x}", *random.choice(WORDS, max(prompt - 1, 1)).tolist()]
    return f"Continue this list of words with a long story about them: {' '.join(words)}"
