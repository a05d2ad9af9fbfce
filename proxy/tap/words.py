"""Errors of ours in the words that the clients of an endpoint read.

All are OpenAI-shaped. Clients of the Messages API look for a `type` beside `error`, and tell errors apart by
`error.type`, for which they know a handful of names; what else an `error` holds they pass over.
"""

from __future__ import annotations

from typing import Any

from policies.errors import ApiError

MESSAGES = "/v1/messages"
_OTHER = "api_error"
_BY_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def said(path: str, error: ApiError) -> dict[str, Any]:
    """The body of an error for a client of that path."""
    body = error.body()
    if not is_messages(path):
        return body
    other = "invalid_request_error" if error.status < 500 else _OTHER
    return {"type": "error", "error": body["error"] | {"type": _BY_STATUS.get(error.status, other)}}


def said_in_a_stream(body: dict[str, Any]) -> dict[str, Any]:
    """An OpenAI-shaped body as an event of a Messages stream, where no status tells what it is."""
    known = body["error"].get("type") in _BY_STATUS.values()
    return {"type": "error", **body, "error": body["error"] if known else body["error"] | {"type": _OTHER}}


def is_messages(path: str) -> bool:
    """Whether clients of the Messages API ask there."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")
