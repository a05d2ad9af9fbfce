"""What a request may cost in tokens, from its body: an upper bound, and what it usually comes to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from policies.limits import NOTHING, Cost, cost
from policies.sampling import COMPLETIONS_MAX_TOKENS
from policies.settings import ModelSettings
from proxy.relay.body import Body

_PROMPT = ("messages", "prompt", "input", "instructions", "system", "tools", "functions", "documents")
_ANSWERING = frozenset({"chat", "completions", "/v1/responses", "/v1/messages"})
_FREE = frozenset({"/v1/messages/count_tokens", "/tokenize", "/detokenize"})
_MEDIA = ("image", "input_image", "audio", "input_audio", "video", "input_video", "file", "input_file", "document")
_DEEPEST = 4


def cost_of(body: Body, model: ModelSettings) -> Cost:
    """What a request may cost. Nothing where an endpoint only counts; no answer where it gives none."""
    if body.endpoint in _FREE:
        return NOTHING
    size, media = _prompt(body)
    answer = body.most_tokens if body.endpoint in _ANSWERING else 0
    if answer is None and body.endpoint == "completions":
        answer = COMPLETIONS_MAX_TOKENS
    return cost(
        size,
        images=media,
        prompts=body.prompts,
        n=body.n if body.endpoint in ("chat", "completions") else 1,
        answer=answer,
        context=model.max_model_len,
    )


def _prompt(body: Body) -> tuple[int, int]:
    """Bytes of JSON that prompts come in, without images and sounds, and how many of those there are."""
    sizes = [len(bytes(body.raws[name])) for name in _PROMPT if name in body.raws]
    if not sizes:
        return len(body.data), 0
    size, media = sum(sizes), 0
    for name in ("messages", "input"):
        for part in _media(body.fields.get(name), _DEEPEST):
            media += 1
            size -= _embedded(part)
    return max(size, 0), media


def _media(parts: Any, deepest: int) -> Iterator[dict[str, Any]]:
    """Parts of messages that hold something else than text."""
    for part in parts if isinstance(parts, list) and deepest else ():
        if not isinstance(part, dict):
            continue
        kind = part.get("type")
        if isinstance(kind, str) and kind.startswith(_MEDIA):
            yield part
        else:
            yield from _media(part.get("content"), deepest - 1)


def _embedded(part: dict[str, Any]) -> int:
    """Bytes of an image's address or data, which are no text."""
    inside = [value for value in part.values() if isinstance(value, dict)]
    return sum(len(text) for fields in (part, *inside) for text in fields.values() if isinstance(text, str))
