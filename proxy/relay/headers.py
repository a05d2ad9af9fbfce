"""Which headers cross the proxy, in either direction."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pydantic import SecretStr

ID = b"x-countersign-id"
MODE = b"x-countersign-mode"
BACKEND = b"x-countersign-backend"
VERDICT = b"x-countersign-verdict"
REASON = b"x-countersign-reason"
RETRIED = b"x-countersign-retried"
REQUEST_ID = b"x-request-id"

# A backend is told nothing about a client that it does not need, so going up is by permission only.
_UP = (b"traceparent", b"tracestate")
_NAME = re.compile(rb"[a-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_MOST = 100
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

# Hop-by-hop headers, what only the proxy itself can say, and what could lead a client past the proxy.
_NEVER_DOWN = frozenset(
    [
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        b"content-encoding",
        b"content-md5",
        b"digest",
        b"etag",
        b"server",
        b"date",
        b"via",
        b"set-cookie",
        b"set-cookie2",
        b"www-authenticate",
        b"location",
        b"content-location",
        b"refresh",
        b"link",
        b"alt-svc",
        b"strict-transport-security",
        b"clear-site-data",
        b"x-accel-redirect",
        b"x-sendfile",
    ]
)
_NEVER_DOWN_PREFIXES = (b"x-countersign-", b"access-control-")


def request_id(headers: Mapping[bytes, bytes]) -> str | None:
    """The client's `x-request-id`, if it is one that can be passed on."""
    value = headers.get(REQUEST_ID, b"")
    return value.decode() if _REQUEST_ID.fullmatch(value) else None


def upstream_headers(headers: Mapping[bytes, bytes], api_key: SecretStr | None, stream: bool) -> list[tuple[str, str]]:
    """Headers for a backend: ours, its own key, tracing and the request id; the client's key never."""
    up = [
        ("content-type", "application/json"),
        ("accept", "text/event-stream" if stream else "application/json"),
        ("accept-encoding", "identity"),
        ("user-agent", "countersign"),
    ]
    if api_key is not None:
        up.append(("authorization", f"Bearer {api_key.get_secret_value()}"))
    if (name := request_id(headers)) is not None:
        up.append((REQUEST_ID.decode(), name))
    up.extend((name.decode(), headers[name].decode("latin-1")) for name in _UP if name in headers)
    return up


def client_headers(raw: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """A backend's response headers that a client may see, names in lower case; malformed ones are left out."""
    lowered = [(name.lower(), value) for name, value in raw]
    named = {
        token.strip().lower() for name, value in lowered if name == b"connection" for token in value.split(b",")
    } | _NEVER_DOWN
    kept = [
        (name, value)
        for name, value in lowered
        if name not in named
        and not name.startswith(_NEVER_DOWN_PREFIXES)
        and _NAME.fullmatch(name)
        and _VALUE.fullmatch(value)
    ]
    return kept[:_MOST]


def first(raw: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes:
    """The first header of that (lower-case) name, or nothing."""
    return next((value for name, value in raw if name.lower() == wanted), b"")
