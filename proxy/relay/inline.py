"""Put a verdict into an answer without touching what the backend said."""

from __future__ import annotations

import json
from typing import Any

import orjson

dumps = orjson.dumps


def add_verdict(body: bytes, verification: dict[str, Any]) -> bytes | None:
    """The JSON object `body` with `countersign` as its last field, all other bytes as they were.

    None when `body` is not a JSON object. NaN and Infinity are let through, as Python's own parser does.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    end = body.rindex(b"}")
    comma = b"," if fields else b""
    return b"".join([body[:end], comma, b'"countersign":', dumps(verification), body[end:]])


def comment(verification: dict[str, Any]) -> bytes:
    """The verdict as a server-sent-events comment, which clients skip."""
    return b": countersign " + dumps(verification) + b"\n\n"
