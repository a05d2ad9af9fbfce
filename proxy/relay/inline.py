"""Put a verdict into an answer without touching what the backend said."""

from __future__ import annotations

import json
from typing import Any

import orjson


def add_verdict(body: bytes, verification: dict[str, Any]) -> bytes | None:
    """The JSON object `body` with `countersign` as its last field, all other bytes as they were.

    None when `body` is not a JSON object. NaN and Infinity are let through, as Python's own parser does.
    """
    end = body.rstrip(b" \t\r\n")
    start = body.lstrip(b" \t\r\n")
    if not (start.startswith(b"{") and end.endswith(b"}")):
        return None
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return None
    head = end[:-1]
    comma = b"" if head.rstrip(b" \t\r\n").endswith(b"{") and not json.loads(body) else b","
    return b"".join([head, comma, b'"countersign":', orjson.dumps(verification), body[len(head) :]])


def comment(verification: dict[str, Any]) -> bytes:
    """The verdict as a server-sent-events comment, which clients skip."""
    return b": countersign " + orjson.dumps(verification) + b"\n\n"
