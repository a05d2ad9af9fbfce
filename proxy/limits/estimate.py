"""What a request may cost in tokens, from its body: an upper bound, and what it usually comes to."""

from __future__ import annotations

import re

from policies.limits import NOTHING, Cost, cost
from policies.settings import ModelSettings
from proxy.relay.body import Body
from proxy.tap.sampling import COMPLETIONS_MAX_TOKENS

_PROMPT = ("messages", "prompt", "input", "instructions", "system", "tools", "functions", "documents")
_ANSWERING = frozenset({"chat", "completions", "/v1/responses", "/v1/messages"})
_FREE = frozenset({"/v1/messages/count_tokens", "/tokenize", "/detokenize"})
_MEDIA = re.compile(rb'"(?:image_url|input_image|image|input_audio|audio_url|video_url|media_type)"\s*:')
_EMBEDDED = re.compile(rb'"data:[^"\\]*"')
_BASE64 = re.compile(rb'"[A-Za-z0-9+/=]{1024,}"')


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
    raws = [bytes(body.raws[name]) for name in _PROMPT if name in body.raws]
    if not raws:
        return len(body.data), 0
    size = media = 0
    for raw in raws:
        if (found := len(_MEDIA.findall(raw))) and len(raw) > 1024:
            media += found
            raw = _BASE64.sub(b"", _EMBEDDED.sub(b"", raw))
        elif found:
            media += found
        size += len(raw)
    return size, media
