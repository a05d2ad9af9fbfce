"""Whether a request's messages hold more than text.

A backend's processor turns an image, sound or film into prompt ids that nobody else can render, and into embeddings
that no ids stand for. Until a replay can be given them, an answer to such a request is never rejected for its prompt,
never passes, and is not replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from policies._request import read
from policies.evidence import Evidence

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})
"""Types of content parts that hold text alone."""
_MEDIA_KEYS = frozenset(
    {
        *("image_url", "image_pil", "image_embeds", "input_image", "audio_url", "audio_embeds", "input_audio"),
        *("video_url", "video_embeds", "prompt_embeds"),
    }
)
"""Keys by which vLLM 0.32 takes a part for media, whatever its type says."""


class _Chat(msgspec.Struct):
    messages: Any = None


_chat = msgspec.json.Decoder(_Chat)


def asked_with_media(evidence: Evidence) -> bool:
    """Whether the request has a message with a part that is not text; False where it cannot be read."""
    return evidence.endpoint == "chat" and _in_request(evidence.request)


@lru_cache(maxsize=4)
def _in_request(request: bytes) -> bool:
    # Requests with media are large, and several checks ask of the same one.
    chat = read(request, _chat)
    return chat is not None and has_media({"messages": chat.messages})


def has_media(body: Mapping[str, Any]) -> bool:
    """The same of a request that was read already."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return False
    return any(_holds_media(message.get("content")) for message in messages if isinstance(message, dict))


def _holds_media(content: Any) -> bool:
    return isinstance(content, list) and any(_is_media(part) for part in content if isinstance(part, dict))


def _is_media(part: dict[str, Any]) -> bool:
    # vLLM takes a part without a type for what its keys say, and refuses one whose type is no word.
    kind = part.get("type", "text")
    return not (isinstance(kind, str) and kind in TEXT_PARTS) or not _MEDIA_KEYS.isdisjoint(part)
