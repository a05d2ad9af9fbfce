"""JSON objects as Redis holds them: whatever else stands in their place is taken for missing."""

from __future__ import annotations

from typing import Any

import orjson


def document(data: bytes | None) -> dict[str, Any] | None:
    """The object in these bytes; None where there are none, or hold none."""
    try:
        value = orjson.loads(data or b"")
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
