"""The usage a backend bills, as it is written."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from policies.evidence import Usage
from proxy.tap.rawjson import UNREADABLE


class Billed(msgspec.Struct):
    """OpenAI's `usage`; only the two counts are required."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: Any = None
    prompt_tokens_details: Any = None
    completion_tokens_details: Any = None


_LONGEST = 65_536
"""Bytes of JSON."""

_billed = msgspec.json.Decoder(Billed)


def read(value: Raw) -> Billed | None:
    """The usage, or None when it is none."""
    if len(memoryview(value)) > _LONGEST:
        return None
    try:
        return _billed.decode(value)
    except UNREADABLE:
        return None


def usage(billed: Billed, prompt_tokens: int, completion_tokens: int) -> Usage:
    """Billed figures beside those the tap counted."""
    return Usage(
        prompt_tokens=billed.prompt_tokens,
        completion_tokens=billed.completion_tokens,
        counted_prompt_tokens=prompt_tokens,
        counted_completion_tokens=completion_tokens,
        total_tokens=_count(billed.total_tokens),
        cached_tokens=_detail(billed.prompt_tokens_details, "cached_tokens"),
        reasoning_tokens=_detail(billed.completion_tokens_details, "reasoning_tokens"),
    )


def _detail(details: Any, name: str) -> int | None:
    return _count(details.get(name)) if isinstance(details, dict) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
