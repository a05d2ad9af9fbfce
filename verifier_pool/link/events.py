"""What webhooks are told, as bytes: `{"type", "timestamp", "sequence", "data"}`, as Standard Webhooks have it.

verification.completed   a response has its verdict
verification.rejected    it has, and the verdict is `reject`
backend.…                something happened to a backend (`policies.standing.Event`)
webhook.test             somebody tries the webhook

`sequence` counts what one webhook is told, from 1. Nothing is sent in that order for certain; a number that never comes
was dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from policies.documents import document
from policies.subscription import Subscription
from policies.verification import Verification, public

_LAST = 2.0**37
"""A Unix second of the year 6325: those that dates can be made of end with the year 9999."""


@dataclass(frozen=True, slots=True)
class Happened:
    """One event, before it is clear who is told.

    Attributes:
        id: 32 hex digits, of the response whose verdict it is, or its own; `msg_ID` is its `webhook-id`.
        about: what it is about: the response's id, a backend's name, or nothing.
        model: that was asked, or that the backend serves.
        at: Unix second.
        verification: of a verdict; then `type` is for each webhook to say.
    """

    id: str
    about: str
    model: str
    at: float
    data: Mapping[str, Any]
    type: str = ""
    verification: Verification | None = None

    def type_for(self, wanted: Subscription) -> str | None:
        """The type of the message for a webhook that takes this; None where it does not take the event."""
        if self.verification is not None:
            return wanted.wants_verdict(self.verification)
        return self.type if wanted.wants_backend(self.type, self.model) else None

    def body(self, type: str) -> tuple[bytes, bytes]:
        """The body of the message up to its sequence number, and after it. The same event gives the same bytes."""
        head = orjson.dumps({"type": type, "timestamp": _time(self.at)})[:-1] + b',"sequence":'
        return head, b',"data":' + orjson.dumps(self.data) + b"}"


def stored(type: str, at: float, data: Mapping[str, Any]) -> bytes:
    """An event that is about no single verdict as it is kept until webhooks are told; `at` in Unix seconds."""
    return orjson.dumps({"type": type, "at": at, "data": data})


def of_verdict(verification: Verification) -> Happened:
    """The event that a response has its verdict. Raises ValueError or KeyError for what is none."""
    id = str(verification["id"])
    at, told = _second(verification["decided"]), public(verification)
    return Happened(id, id, str(verification["model"]), at, told, verification=verification)


def of_stored(id: str, data: bytes | None, models: Mapping[str, str]) -> Happened | None:
    """An event as it was kept; None where it expired or cannot be read. `models`: of backends, by name."""
    found = document(data)
    if found is None or not isinstance(found.get("data"), dict):
        return None
    backend = str(found["data"].get("backend", ""))
    try:
        at = _second(found.get("at"))
    except ValueError:
        return None
    return Happened(id, backend, models.get(backend, ""), at, found["data"], str(found.get("type")))


def _second(at: object) -> float:
    if not isinstance(at, int | float) or not 0 <= at < _LAST:
        raise ValueError("not a moment")
    return float(at)


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
