"""The verification as JSON: the shape that the API, webhooks and inline answers share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from policies.evidence import Endpoint

STORE_UNAVAILABLE = "store_unavailable"
BACKLOG = "backlog"
NO_ANSWER = "no_answer"
CLIENT_LEFT = "client_left"
INTERNAL_ERROR = "internal_error"


@dataclass(slots=True)
class Generation:
    """One response on its way through the proxy, and what will be said of it.

    `recorded` turns false when the intent could not be written; such a response stays unverified.
    Times are Unix seconds.
    """

    id: str
    owner: str
    endpoint: Endpoint
    model: str
    mode: str
    stream: bool
    backend: str = ""
    created: float = field(default_factory=time.time)
    recorded: bool = True

    def intent(self) -> dict[str, Any]:
        """What is written before the request goes up."""
        return {
            "id": self.id,
            "owner": self.owner,
            "backend": self.backend,
            "model": self.model,
            "endpoint": self.endpoint,
            "created": self.created,
            "mode": self.mode,
            "stream": self.stream,
        }


def pending(intent: dict[str, Any]) -> dict[str, Any]:
    """The verification of a generation that has no verdict yet."""
    return {**_frame(intent), "status": "pending", "verdict": None, "decided": None}


def unverified(intent: dict[str, Any], reason: str) -> dict[str, Any]:
    """The verification of a generation on which nothing was checked, and why."""
    return {**_frame(intent), "status": "done", "verdict": "unverified", "reasons": [reason], "decided": time.time()}


def public(verification: dict[str, Any]) -> dict[str, Any]:
    """The verification without what only we may see."""
    return {key: value for key, value in verification.items() if key != "owner"}


def _frame(intent: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": intent["id"],
        "object": "verification",
        "status": "",
        "verdict": None,
        "reasons": [],
        "checks": [],
        "backend": intent["backend"],
        "model": intent["model"],
        "audited": False,
        "created": intent["created"],
        "decided": None,
        "owner": intent["owner"],
    }
