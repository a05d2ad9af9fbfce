"""The scripted backend's answer: a chat stream such as vLLM 0.32 sends, as bytes prepared in advance."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

MODEL = "scripted"
VOCABULARY = 32_000
TOP = 20
SEED = 2025
PROMPT_IDS = tuple(range(100, 132))
_HEAD = {"id": "chatcmpl-scripted", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": MODEL}
_PACE = re.compile(rb"\[pace ([0-9.]+)/([0-9.]+) ms\]")


def paced(first: float, interval: float) -> str:
    """What a prompt says to get its tokens at this pace (seconds); no gateway can lose it on the way."""
    return f"[pace {first * 1000:g}/{interval * 1000:g} ms]"


@dataclass(frozen=True, slots=True)
class Ask:
    """What of an OpenAI request changes the answer.

    `pace`, where the prompt says one (`paced`), is the seconds to the first token and between tokens.
    """

    tokens: int
    evidence: bool
    usage: bool
    pace: tuple[float, float] | None = None

    @classmethod
    def read(cls, body: bytes, limit: int) -> Ask:
        """The ask in a request body; `limit` caps the tokens. Raises ValueError on anything but a JSON object."""
        request = orjson.loads(body)
        if not isinstance(request, dict):
            raise ValueError("expected a JSON object")
        asked = request.get("max_completion_tokens") or request.get("max_tokens") or limit
        usage = (request.get("stream_options") or {}).get("include_usage", False)
        pace = _PACE.search(body)
        seconds = (float(pace[1]) / 1000, float(pace[2]) / 1000) if pace else None
        return cls(min(int(asked), limit), bool(request.get("logprobs")), bool(usage), seconds)


class Script:
    """Every frame of the longest answer; a shorter one is a slice with its own last token.

    Args:
        tokens: tokens of the longest answer.
    """

    def __init__(self, tokens: int) -> None:
        rng = np.random.default_rng(SEED)
        self.tokens = tokens
        self.words = [f" word{index}" for index in range(tokens)]
        self._ids = [rng.choice(VOCABULARY, TOP, replace=False).tolist() for _ in range(tokens)]
        self._logprobs = [_descending(rng) for _ in range(tokens)]
        self._frames: dict[tuple[int, bool, bool], bytes] = {}

    def text(self, tokens: int) -> str:
        """What a client should have read in the end."""
        return "".join(self.words[:tokens])

    def role(self, ask: Ask) -> bytes:
        """The first frame, which carries the role and the prompt's ids."""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ids = list(PROMPT_IDS) if ask.evidence else None
        return _frame([choice], prompt_token_ids=ids, prompt_text=None)

    def token(self, ask: Ask, index: int) -> bytes:
        """The frame of one token; the last one also says why it stopped."""
        key = (index, ask.evidence, index == ask.tokens - 1)
        if key not in self._frames:
            self._frames[key] = self._build(*key)
        return self._frames[key]

    def end(self, ask: Ask) -> bytes:
        """Usage, when asked for, and the terminal frame."""
        count = len(PROMPT_IDS) + ask.tokens
        usage = {"prompt_tokens": len(PROMPT_IDS), "total_tokens": count, "completion_tokens": ask.tokens}
        return (_frame([], usage=usage) if ask.usage else b"") + b"data: [DONE]\n\n"

    def whole(self, ask: Ask) -> bytes:
        """The same answer to a request that does not stream: a JSON body."""
        count = len(PROMPT_IDS) + ask.tokens
        claims = [self._claim(index)["content"][0] for index in range(ask.tokens)] if ask.evidence else None
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.text(ask.tokens)},
            "logprobs": None if claims is None else {"content": claims},
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": [self._ids[index][0] for index in range(ask.tokens)] if ask.evidence else None,
        }
        usage = {"prompt_tokens": len(PROMPT_IDS), "total_tokens": count, "completion_tokens": ask.tokens}
        more = {"usage": usage, "prompt_token_ids": list(PROMPT_IDS) if ask.evidence else None}
        return orjson.dumps({**_HEAD, "object": "chat.completion", "choices": [choice], **more})

    def _build(self, index: int, evidence: bool, last: bool) -> bytes:
        choice: dict[str, Any] = {
            "index": 0,
            "delta": {"content": self.words[index]},
            "logprobs": self._claim(index) if evidence else None,
            "finish_reason": "length" if last else None,
        }
        if last:
            choice["stop_reason"] = None
        choice["token_ids"] = [self._ids[index][0]] if evidence else None
        return _frame([choice], **({"system_fingerprint": "scripted"} if last else {}))

    def _claim(self, index: int) -> dict[str, Any]:
        rows = zip(self._ids[index], self._logprobs[index], strict=True)
        top = [_entry(f"token_id:{token}", logprob) for token, logprob in rows]
        sampled = {**top[0], "bytes": list(self.words[index].encode())}
        return {"content": [{**sampled, "top_logprobs": top}]}


def _descending(rng: np.random.Generator) -> list[float]:
    """Twenty logprobs in falling order whose probabilities leave room for the rest of the vocabulary."""
    weights = np.sort(rng.dirichlet(np.full(TOP + 1, 0.5)) + 1e-6)[::-1]
    logprobs: list[float] = np.log(weights[:TOP] / weights.sum()).astype(np.float32).astype(float).tolist()
    return logprobs


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def _frame(choices: list[dict[str, Any]], **more: Any) -> bytes:
    return b"data: " + orjson.dumps({**_HEAD, "choices": choices, **more}) + b"\n\n"
