"""Errors of ours where clients of the Messages API ask: in its shape, and in OpenAI's at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from policies import errors
from policies.errors import ApiError, RateLimited
from policies.settings import hash_key
from proxy.tap.words import said, said_in_a_stream
from tests.proxy.conftest import Rig
from tests.support import wire
from tests.support.fake_backend import Close

PATHS = ("/v1/messages", "/v1/messages/count_tokens")
OTHERS = ("/v1/responses", "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messagesx")
KNOWN = {
    *("api_error", "authentication_error", "invalid_request_error", "not_found_error", "overloaded_error"),
    *("permission_error", "rate_limit_error", "request_too_large", "timeout_error"),
}
"""What clients of the Messages API tell errors apart by."""


def shape(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    """The error, after its shape was looked at."""
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    body: dict[str, Any] = response.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == kind
    return body["error"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", PATHS)
def test_refused_requests(rig: Rig, path: str) -> None:
    shape(rig.http.post(path, content=b"{"), 400, "invalid_request_error")
    shape(rig.http.post(path, json={}), 400, "invalid_request_error")
    error = shape(rig.http.post(path, json={"model": "unknown"}), 404, "not_found_error")
    assert error["code"] == "model_not_found"
    shape(rig.http.get(path), 405, "invalid_request_error")
    hinted = rig.http.post(path, json={"model": "m"}, headers={"x-countersign-mode": "sometimes"})
    shape(hinted, 400, "invalid_request_error")


def test_clients_without_a_key(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(keys=[{"name": "k", "sha256": hash_key("sk-mine")}])
    error = shape(rig.http.post(PATHS[0], json={"model": "m"}), 401, "authentication_error")
    assert error["code"] == "invalid_api_key"


def test_bodies_over_the_limit(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(bounds={"request_bytes": 1000})
    shape(rig.http.post(PATHS[0], json={"model": "m", "x": "y" * 2000}), 413, "request_too_large")


@pytest.mark.parametrize("path", PATHS)
def test_backends_that_break(make_rig: Callable[..., Rig], path: str) -> None:
    rig = make_rig(relay={"retries": 0})
    rig.backend.script = [Close()]
    assert shape(rig.http.post(path, json={"model": "m"}), 502, "api_error")["code"] == "upstream_failed"


def test_streams_that_break_off(rig: Rig) -> None:
    rig.backend.script = [
        wire.SSE_HEAD,
        wire.chunk(b'event: message_start\ndata: {"type":"message_start"}\n\n'),
        Close(),
    ]
    response = rig.http.post(PATHS[0], json={"model": "m", "stream": True})
    event = response.text.strip().split("\n\n")[-1]
    assert event.startswith("event: error\ndata: ")
    body = json.loads(event.partition("data: ")[2])
    assert body["type"] == "error"
    assert body["error"]["type"] == "api_error"
    assert body["error"]["code"] == "upstream_closed"


@pytest.mark.parametrize("path", OTHERS)
def test_nobody_else_is_told_otherwise(rig: Rig, path: str) -> None:
    response = rig.http.post(path, content=b"{")
    assert set(response.json()) == {"error"}
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_every_error_has_a_name_that_clients_know() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ApiError)}
    assert len(kinds) > 10
    for kind in kinds:
        error = kind("x", retry_after=1.0) if issubclass(kind, RateLimited) else kind("x")
        for path in PATHS:
            assert said(path, error)["error"]["type"] in KNOWN, kind
        for path in OTHERS:
            assert said(path, error) == error.body()
        assert said_in_a_stream(error.body())["error"]["type"] in KNOWN, kind
