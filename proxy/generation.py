"""One response on its way through the proxy, and why it may end without a verdict."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from policies.receipt import Facts
from policies.settings import Retain

STORE_UNAVAILABLE = "store_unavailable"
BACKLOG = "backlog"
NO_ANSWER = "no_answer"
CLIENT_ERROR = "client_error"
"""The backend refused the request with a status 4xx, and nothing was served."""
ENDPOINT = "endpoint"
"""The request went to an endpoint whose answers carry no evidence."""
CLIENT_LEFT = "client_left"
PROXY_STOPPED = "proxy_stopped"
"""The proxy was told to stop, and did not wait any longer for the answer to end."""
INTERNAL_ERROR = "internal_error"


@dataclass(slots=True)
class Generation:
    """One response on its way through the proxy, and what will be said of it.

    `recorded` turns false when the intent could not be written; such a response stays unverified. `declaration` is what
    its backend is declared to run (`policies.unit.declaration_of`). `operator` marks the operator's own traffic.
    `retain` is what is kept of its evidence after the verdict.
    `endpoint` is `chat`, `completions`, or the path of another one, which is relayed unverified. `trace` is where it
    belongs in a trace (`policies.traceparent`), empty where it is not traced. Times are Unix seconds.

    For its receipt, SHA-256 in hex and empty as long as there is nothing to hash: `request`, the body as it came;
    `sent`, the body as it went up, which what has evidence has there; `served`, what was passed on of an answer.
    `instead_of` is the id of the generation for the same request whose place this one took. `query` goes up with it:
    `?` and what followed it, of a request that is relayed unverified.
    """

    id: str
    owner: str
    endpoint: str
    model: str
    mode: str
    stream: bool
    backend: str = ""
    declaration: dict[str, str] = field(default_factory=dict)
    operator: bool = False
    retain: Retain = "all"
    created: float = field(default_factory=time.time)
    recorded: bool = True
    trace: str = ""
    request: str = ""
    sent: str = ""
    served: str = ""
    instead_of: str = ""
    query: str = ""

    @property
    def verifiable(self) -> bool:
        """Whether its answers carry evidence."""
        return not self.endpoint.startswith("/")

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
            retain=self.retain,
            request=self.request,
            instead_of=self.id,
            query=self.query,
        )

    def facts(self) -> Facts:
        """What its receipt says where there is no evidence."""
        return Facts(
            request=self.request,
            sent=self.sent,
            served=self.served,
            declared=self.declaration,
            instead_of=self.instead_of,
        )

    def intent(self) -> dict[str, Any]:
        """What is written of it before anything of an answer is passed on."""
        more = {"trace": self.trace, "request_sha256": self.request, "instead_of": self.instead_of}
        return {name: value for name, value in more.items() if value} | {
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
            **({} if self.retain == "all" else {"retain": self.retain}),
        }
