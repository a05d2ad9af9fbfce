"""The most that one answer may bring: the operator's bounds, and no more than what was asked for explains.

What goes beyond is the backend's doing alone, so it is `too_large` in the evidence, which counts as withheld.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.settings import BoundsSettings
from proxy.tap.types import Prepared

_BASE = 4 * 1024 * 1024
_PER_TOKEN = 16 * 1024
"""Bytes of JSON per token. The longest tokens with 20 alternatives take a third of it, expert ids a tenth."""
_PER_PROMPT_BYTE = 1536
"""Bytes of JSON per byte of the request, which is a token at the most: its id, and its expert ids in base64."""
_SPARE_TOKENS = 16
"""Tokens per choice over what was asked for that are still recorded, so that evidence can show them."""

_FEW = (None, *range(21))


@dataclass(frozen=True, slots=True)
class Allowed:
    """Limits for one answer.

    Attributes:
        body: bytes of a body that is not streamed. `stream`: of a stream, whatever it is made of. `line`: of a line,
            and of an event, of a stream.
        depth: objects and arrays inside each other.
        tokens: output tokens over all choices. `prompt_tokens`: prompt tokens over all prompts.
        characters: text over all choices.
        evidence: bytes of evidence before compression.
    """

    body: int
    stream: int
    line: int
    depth: int
    tokens: int
    prompt_tokens: int
    characters: int
    evidence: int


def passed_stream(tokens: int | None, bounds: BoundsSettings) -> int:
    """Bytes of a stream of an endpoint that is passed on, where that many tokens were asked for: what a body may have,
    and more if so many tokens may take it."""
    return max(bounds.answer_bytes, _BASE + min(tokens or 0, bounds.answer_tokens) * _PER_TOKEN)


def allowed(prepared: Prepared, bounds: BoundsSettings) -> Allowed:
    """What the answer to a request may bring."""
    tokens, body, per_token = bounds.answer_tokens, bounds.answer_bytes, _PER_TOKEN
    most, choices = prepared.sampling.max_tokens, prepared.prompts * prepared.n
    if most is not None and most >= 0:
        tokens = min(tokens, choices * (most + _SPARE_TOKENS))
        if not prepared.media and prepared.asked.logprobs in _FEW:
            prompt = len(prepared.body) * _PER_PROMPT_BYTE
            body = min(body, _BASE + tokens * _PER_TOKEN + choices * prompt)
    # A stream is not held, so that it may be long; a prompt's tokens come in one event of it.
    if prepared.asked.logprobs not in _FEW:
        per_token = bounds.line_bytes
    prompt = bounds.line_bytes if prepared.media else min(len(prepared.body) * _PER_PROMPT_BYTE, bounds.line_bytes)
    return Allowed(
        body=body,
        stream=_BASE + tokens * per_token + choices * prompt,
        line=bounds.line_bytes,
        depth=bounds.json_depth,
        tokens=tokens,
        prompt_tokens=bounds.prompt_tokens,
        characters=bounds.answer_characters,
        evidence=bounds.evidence_bytes,
    )
