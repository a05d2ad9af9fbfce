"""Which requests are alike: those of one session, else those whose prompts begin alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from policies.settings import RoutingSettings
from proxy.backends.rendezvous import hash_of

_BEFORE = ("instructions", "system")
_PROMPTS = ("messages", "prompt", "input")


def key_of(fields: Mapping[str, Any], owner: str, rules: RoutingSettings) -> int | None:
    """64 bits that requests have in common which had better go to the same backend; None where nothing tells.

    Args:
        fields: the request's body, decoded.
        owner: whose request it is; a session is one of its own, a prompt anybody's.
    """
    for name in rules.sticky:
        value = fields.get(name)
        if isinstance(value, str) and value:
            return hash_of(b"\0".join((b"session", owner.encode(), _bytes(name), _bytes(value))))
    beginning = _beginning(fields, rules.prefix_bytes)
    return hash_of(b"prompt\0" + beginning) if beginning else None


def _beginning(fields: Mapping[str, Any], most: int) -> bytes:
    """The first `most` bytes of what a prompt is rendered from, whatever its spelling as JSON."""
    texts: list[str] = []
    left = most
    for name in _BEFORE:
        left = _collect(fields.get(name), left, texts)
    for name in _PROMPTS:
        value = fields.get(name)
        # Each message takes one byte at least, so those behind make no difference, however many a request has.
        left = _collect(_opening(value[:most]) if isinstance(value, list) else value, left, texts)
    return _bytes("\0".join(texts))[:most]


def _opening(messages: list[Any]) -> list[Any]:
    """Messages up to the first of the user: a conversation keeps these while it grows."""
    for at, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            return messages[: at + 1]
    return messages


def _collect(value: Any, left: int, texts: list[str]) -> int:
    """Append a value's texts in their order; returns how much more is wanted."""
    if left <= 0 or value is None:
        return left
    if isinstance(value, dict | list):
        parts: Iterable[Any] = (part for item in value.items() for part in item) if isinstance(value, dict) else value
        for part in parts:
            left = _collect(part, left, texts)
            if left <= 0:
                break
        return left - 1
    text = (value if isinstance(value, str) else repr(value))[:left]
    texts.append(text)
    return left - len(text) - 1


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
