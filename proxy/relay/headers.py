"""Which headers cross the proxy, in either direction."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pydantic import SecretStr

from proxy.relay.secret import NONE, Secret

ID = b"x-countersign-id"
MODE = b"x-countersign-mode"
BACKEND = b"x-countersign-backend"
VERDICT = b"x-countersign-verdict"
REASON = b"x-countersign-reason"
RETRIED = b"x-countersign-retried"
REQUEST_ID = b"x-request-id"
NOT_AGAIN = (b"x-should-retry", b"false")
"""OpenAI's clients then do not ask again by themselves."""
_REQUEST_IDS = (REQUEST_ID, b"request-id")

# A backend is told nothing about a client that it does not need, so going up is by permission only.
_UP_TRACED = (b"traceparent", b"tracestate")
_UP_UNVERIFIED = (b"anthropic-version", b"anthropic-beta")
_NAME = re.compile(rb"[a-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_MOST = 100
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

# Hop-by-hop headers, what only the proxy itself can say, and what could lead a client past the proxy.
_NEVER_DOWN = frozenset(
    [
        b"connection",
        b"keep-alive",
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
_CODINGS = re.compile(
    rb"utf-?8|(us-)?ascii|(iso-?8859|windows-125|cp125|koi8)[0-9a-z_-]*|latin-?1|gb2312|gbk|gb18030|big5|euc-(jp|kr)|shift_jis"
)
"""Codings in which ASCII is spelled as ASCII and as nothing else, so that whoever looks for a word of it finds it."""
_NEVER_DOWN_PREFIXES = (b"x-countersign-", b"access-control-", b"proxy-", b"authorization", b"x-api-key", b"api-key")


def _request_ids(headers: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The client's names for its request that can be passed on."""
    if headers.keys().isdisjoint(_REQUEST_IDS):
        return {}
    return {name: value for name in _REQUEST_IDS if _REQUEST_ID.fullmatch(value := headers.get(name, b""))}


def echoed(headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """The names a client gave its request, for an answer to it."""
    return list(_request_ids(headers).items())


def with_request_ids(
    raw: list[tuple[bytes, bytes]], asked: Mapping[bytes, bytes], ours: str
) -> list[tuple[bytes, bytes]]:
    """Headers for the client with the names it gave its request itself (`asked` are its headers); without one an
    `x-request-id` of the backend's, or `ours`."""
    theirs = _request_ids(asked)
    kept = [(name, value) for name, value in raw if name not in theirs]
    if REQUEST_ID not in theirs and not first(raw, REQUEST_ID):
        theirs[REQUEST_ID] = ours.encode()
    return [*kept, *theirs.items()]


def upstream_headers(
    headers: Mapping[bytes, bytes],
    api_key: SecretStr | None,
    stream: bool,
    *,
    verifiable: bool = True,
    traced: bool = False,
) -> list[tuple[str, str]]:
    """Headers for a backend: ours, its own key, and the request id; which trace it belongs to where it may know, and
    the client's key never."""
    up = [
        ("content-type", "application/json"),
        ("accept", "text/event-stream" if stream else "application/json"),
        ("accept-encoding", "identity"),
        ("user-agent", "countersign"),
    ]
    if api_key is not None:
        up.append(("authorization", f"Bearer {api_key.get_secret_value()}"))
    for name, value in _request_ids(headers).items():
        up.append((name.decode(), value.decode()))
    for name in (() if verifiable else _UP_UNVERIFIED) + (_UP_TRACED if traced else ()):
        if name in headers:
            up.append((name.decode(), headers[name].decode("latin-1")))
    return up


def client_headers(raw: Iterable[tuple[bytes, bytes]], secret: Secret = NONE) -> list[tuple[bytes, bytes]]:
    """A backend's response headers that a client may see, names in lower case; malformed ones are left out, and those
    that quote the backend's key."""
    lowered = [(name.lower(), value) for name, value in raw]
    named = {
        token.strip().lower() for name, value in lowered if name == b"connection" for token in value.split(b",")
    } | _NEVER_DOWN
    kept = [
        (name, _without_coding(value) if name == b"content-type" else value)
        for name, value in lowered
        if name not in named
        and not name.replace(b"_", b"-").startswith(_NEVER_DOWN_PREFIXES)
        and _NAME.fullmatch(name)
        and _VALUE.fullmatch(value)
        and not secret.stands_in(value)
    ]
    kinds = [at for at, (name, _) in enumerate(kept) if name == b"content-type"]
    for at in reversed(kinds[1:]):
        del kept[at]
    return kept[:_MOST]


def _without_coding(content_type: bytes) -> bytes:
    """Without the charset, where that is one in which a client would read something else than everybody else does."""
    kind, *parameters = content_type.split(b";")
    for parameter in parameters:
        name, _, value = parameter.partition(b"=")
        coding = value.strip(b" \t\"'").lower()
        if name.strip(b" \t*").lower() == b"charset" and not _CODINGS.fullmatch(coding):
            return kind.strip()
    return content_type


def first(raw: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes:
    """The first header of that (lower-case) name, or nothing."""
    for name, value in raw:
        if name.lower() == wanted:
            return value
    return b""
