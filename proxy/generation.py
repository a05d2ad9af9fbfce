"""One response on its way through the proxy, and why it may end without a verdict."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from policies.evidence import Endpoint

STORE_UNAVAILABLE = "store_unavailable"
BACKLOG = "backlog"
NO_ANSWER = "no_answer"
CLIENT_ERROR = "client_error"
"""The backend refused the request with a status 4xx, and nothing was served."""
CLIENT_LEFT = "client_left"
INTERNAL_ERROR = "internal_error"


@dataclass(slots=True)
class Generation:
    """One response on its way through the proxy, and what will be said of it.

    `recorded` turns false when the intent could not be written; such a response stays unverified. `declaration` is what
    its backend is declared to run (`policies.unit.declaration_of`). `operator` marks the operator's own traffic.
    Times are Unix seconds.
    """

    id: str
    owner: str
    endpoint: Endpoint
    model: str
    mode: str
    stream: bool
    backend: str = ""
    declaration: dict[str, str] = field(default_factory=dict)
    operator: bool = False
    created: float = field(default_factory=time.time)
    recorded: bool = True

    def again(self, id: str) -> Generation:
        """Another generation for the same request."""
        return Generation(
            id=id,
            owner=self.owner,
            endpoint=self.endpoint,
            model=self.model,
            mode=self.mode,
            stream=self.stream,
            operator=self.operator,
        )

    def intent(self) -> dict[str, Any]:
        """What is written before the request goes up."""
        return {
            "id": self.id,
            "owner": self.owner,
            "backend": self.backend,
            "declaration": self.declaration,
            "operator": self.operator,
            "model": self.model,
            "endpoint": self.endpoint,
            "created": self.created,
            "mode": self.mode,
            "stream": self.stream,
        }
