"""When a backend would not answer: whether another one may, and what status an error in a stream stands for."""

from __future__ import annotations

from typing import Any

import orjson

from policies.errors import UpstreamFailed, UpstreamTimeout

_ANOTHER_MAY = frozenset({408, 429, 500, 502, 503, 504})
_BY_TYPE = {
    "invalid_request_error": 400,
    "badrequesterror": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "notfounderror": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "overloaded_error": 503,
}
_UNKNOWN = 502


class Declined(UpstreamFailed):
    """A backend would not or could not answer, and another one may: `said` is its status."""

    def __init__(self, message: str, said: int) -> None:
        super().__init__(message)
        self.said = said


def reason_of(error: BaseException | None) -> str:
    """Why another backend was asked: `status_…`, `timeout` or `broken`."""
    if isinstance(error, Declined):
        return f"status_{error.said}"
    return "timeout" if isinstance(error, UpstreamTimeout) else "broken"


def retryable(status: int) -> bool:
    """Whether a status says something about the backend rather than about the request."""
    return status in _ANOTHER_MAY


def status_of(error: bytes) -> int:
    """The HTTP status for a JSON object that says what went wrong: its own, or what its type stands for, or 502."""
    try:
        top: Any = orjson.loads(error)
    except orjson.JSONDecodeError:
        return _UNKNOWN
    said = top.get("error") if isinstance(top, dict) else None
    fields = [item for item in (said, top) if isinstance(item, dict)]
    for item in fields:
        for name in ("code", "status", "status_code"):
            status = _status(item.get(name))
            if status is not None:
                return status
    for item in fields:
        for name in ("type", "code"):
            if (known := _BY_TYPE.get(str(item.get(name)).lower())) is not None:
                return known
    return _UNKNOWN


def _status(value: Any) -> int | None:
    number = int(value) if isinstance(value, str) and len(value) == 3 and value.isdecimal() else value
    return number if isinstance(number, int) and 400 <= number < 600 else None
