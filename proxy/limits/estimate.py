"""What a request may cost in tokens, from its body: an upper bound, and what it usually comes to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from policies.limits import NOTHING, Cost, cost
from policies.sampling import COMPLETIONS_MAX_TOKENS
from policies.settings import ModelSettings
from proxy.relay.body import Body

_OUTSIDE = ("logit_bias", "stop", "stop_sequences", "stop_token_ids", "bad_words", "allowed_token_ids", "metadata")
"""Fields that may be long and are in no prompt; every other one a template may print."""
_ANSWERING = frozenset({"chat", "completions", "/v1/responses", "/v1/messages"})
_FREE = frozenset({"/v1/messages/count_tokens", "/tokenize", "/detokenize"})
_ELSEWHERE = ("previous_response_id", "conversation", "prompt")
"""What a request to /v1/responses may continue, which only the backend has."""
_OWN_TOOLS = ("function", "custom")
"""Tools that the client runs; others the backend does, and adds what they say to the prompt."""
_MEDIA = ("image", "input_image", "audio", "input_audio", "video", "input_video", "file", "input_file", "document")
_DATA = ("data", "url", "image_url", "audio_url", "video_url", "file_url", "file_data", "image_embeds", "audio_embeds")
"""Where a part of a message has what it shows, or its address."""
_PAIRED = ("query", "text_1", "data_1")
"""What a scoring endpoint holds against each of many texts."""
_DEEPEST = 4


def cost_of(body: Body, model: ModelSettings) -> Cost:
    """What a request may cost. Nothing where an endpoint only counts; no answer where it gives none."""
    if body.endpoint in _FREE:
        return NOTHING
    answer = body.most_tokens if body.endpoint in _ANSWERING else 0
    if answer is None and body.endpoint == "completions":
        answer = COMPLETIONS_MAX_TOKENS
    prompts = body.prompts if body.endpoint in _ANSWERING else _texts(body)
    media = list(_media(body))
    size = len(body.data) - sum(len(bytes(body.raws[name])) for name in _OUTSIDE if name in body.raws)
    size += (prompts - 1) * _repeated(body)
    return cost(
        size - sum(map(_embedded, media)),
        template=model.template_tokens if "messages" in body.raws or body.endpoint == "/v1/responses" else 0,
        unseen=len(media) + _elsewhere(body),
        prompts=prompts,
        n=body.n if body.endpoint in ("chat", "completions") else 1,
        answer=answer,
        context=model.max_model_len,
    )


def _texts(body: Body) -> int:
    """How many prompts an endpoint without answers may make of a request."""
    lists = (value for value in body.fields.values() if isinstance(value, list) and value)
    return max([body.prompts, *(len(value) for value in lists if not isinstance(value[0], int))])


def _repeated(body: Body) -> int:
    """Bytes of what stands in the request once and in each of its prompts."""
    if body.endpoint in _ANSWERING:
        return 0
    alone = (name for name in _PAIRED if name in body.raws and not _is_many(body.fields[name]))
    return sum(len(bytes(body.raws[name])) for name in alone)


def _is_many(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1


def _elsewhere(body: Body) -> int:
    """How many parts of the prompt only the backend has."""
    if body.endpoint != "/v1/responses":
        return 0
    tools = body.fields.get("tools")
    foreign = (each for each in tools if isinstance(each, dict)) if isinstance(tools, list) else ()
    return sum(body.fields.get(name) is not None for name in _ELSEWHERE) + sum(
        each.get("type") not in _OWN_TOOLS for each in foreign
    )


def _media(body: Body) -> Iterator[dict[str, Any]]:
    """Parts of messages that hold something else than text. A message is none, whatever it calls itself."""
    for name in ("messages", "input"):
        messages = body.fields.get(name)
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                yield from _parts(message.get("content"), _DEEPEST)


def _parts(parts: Any, deepest: int) -> Iterator[dict[str, Any]]:
    for part in parts if isinstance(parts, list) and deepest else ():
        if not isinstance(part, dict):
            continue
        kind = part.get("type")
        if isinstance(kind, str) and kind.startswith(_MEDIA):
            yield part
        else:
            yield from _parts(part.get("content"), deepest - 1)


def _embedded(part: dict[str, Any]) -> int:
    """Bytes of an image's address or data, which are no text."""
    found = 0
    for fields in (part, *(value for value in part.values() if isinstance(value, dict))):
        if fields.get("type") != "text":
            found += sum(len(text) for name in _DATA if isinstance(text := fields.get(name), str))
    return found
