"""What the webhook is told, as bytes: `{"type", "timestamp", "data"}`, as Standard Webhooks have it.

verification.completed   a response has its verdict
verification.rejected    it has, and the verdict is `reject`
backend.…                something happened to a backend (`policies.standing.Event`)
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from policies.checks import VerdictWord
from policies.verification import Verification, public


def body(type: str, at: float, data: Mapping[str, Any]) -> bytes:
    """The body of one event; `at` in Unix seconds. The same arguments give the same bytes."""
    timestamp = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    return orjson.dumps({"type": type, "timestamp": timestamp, "data": data})


def of_verdict(verification: Verification) -> bytes:
    """The body for a verdict: depends on what is stored alone, so every try sends the same bytes."""
    rejected = verification["verdict"] == VerdictWord.REJECT
    type = "verification.rejected" if rejected else "verification.completed"
    return body(type, verification["decided"], public(verification))
