"""The proxy's own endpoints, who is let in, and the one shape of every error."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import socket
from collections.abc import Callable

import httpx
import pytest

from policies.errors import AuthenticationFailed
from policies.settings import ClientKey, hash_key
from proxy.api.auth import Keys, is_loopback
from tests.proxy.conftest import Rig
from tests.support import wire
from tests.support.fake_backend import Close
from tests.support.waiting import PATIENCE
from verifier_pool.link.telemetry import log

KEYS = [{"name": "ann", "sha256": hash_key("sk-ann")}]


def _assert_shape(response: httpx.Response) -> dict[str, str | None]:
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return dict(error)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/rerank", 404),
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/verifications/x", 405),
        ("GET", "/v1/models/none", 404),
        ("GET", "/v1/verifications/none", 404),
        ("GET", "/v1/verifications/none?wait=soon", 422),
        ("GET", "/v1/models/", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
    ],
)
def test_errors_have_one_shape(rig: Rig, method: str, path: str, status: int) -> None:
    response = rig.http.request(method, path)
    assert response.status_code == status
    _assert_shape(response)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"model": NaN}', b"[" * 100_000, b'{"model": 1}', b"{}"]
)
def test_bad_bodies(rig: Rig, body: bytes) -> None:
    response = rig.http.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    _assert_shape(response)
    assert rig.backend.requests == []


def test_unknown_model(rig: Rig) -> None:
    response = rig.chat(model="gpt-9")
    assert response.status_code == 404
    assert _assert_shape(response)["code"] == "model_not_found"


def test_refused_fields(rig: Rig) -> None:
    response = rig.chat(kv_transfer_params={"prompt_token_ids": [1]})
    assert response.status_code == 400
    assert _assert_shape(response)["param"] == "kv_transfer_params"
    assert "x-countersign-id" not in response.headers
    assert rig.backend.requests == []


def test_too_large(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(bounds={"request_bytes": 1000})
    response = rig.http.post("/v1/chat/completions", content=b"x" * 5_000_000)
    assert response.status_code == 413
    assert _assert_shape(response)["code"] == "request_too_large"
    chunked = rig.http.post("/v1/chat/completions", content=iter([b"x" * 600] * 100))
    assert chunked.status_code == 413
    _assert_shape(chunked)
    with socket.create_connection(("127.0.0.1", rig.proxy.port), timeout=PATIENCE) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 413")


def test_large_body_in_many_parts_arrives_whole(rig: Rig) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    text = "x" * 3_000_000
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    parts = (body[at : at + 7919] for at in range(0, len(body), 7919))
    assert rig.http.post("/v1/chat/completions", content=parts).status_code == 200
    assert json.loads(rig.backend.last.body)["messages"][0]["content"] == text
    assert rig.backend.last.headers[b"content-length"] == str(len(rig.backend.last.body)).encode()
    assert b"content-disposition" not in rig.backend.last.headers


def test_models(rig: Rig) -> None:
    listed = rig.http.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["m"]
    assert rig.http.get("/v1/models/m").json() == listed["data"][0]


def test_model_names_with_slashes(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(models={"org/m": {}}, backends=[{"name": "b", "url": "http://127.0.0.1:9", "model": "org/m"}])
    assert rig.http.get("/v1/models/org/m").json()["id"] == "org/m"


def test_health(rig: Rig) -> None:
    assert rig.http.get("/healthz").status_code == 200
    ready = rig.http.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")
    rig.proxy.drain.draining = True
    ready = rig.http.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (503, "draining")
    refused = rig.chat()
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["connection"] == "close"
    assert rig.http.get("/healthz").status_code == 200


def test_nobody_waits_for_a_verdict_through_a_drain(rig: Rig) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    id = rig.chat().headers["x-countersign-id"]
    rig.proxy.drain.draining = True
    assert rig.http.get(f"/v1/verifications/{id}?wait=120").json()["status"] == "pending"


def test_without_backends_not_ready(make_rig: Callable[..., Rig]) -> None:
    assert make_rig(backends=[]).http.get("/readyz").status_code == 503


def test_metrics(rig: Rig) -> None:
    rig.backend.queue = [[wire.whole(wire.BODY)], [wire.whole(b"{}", 500)]]
    rig.backend.script = [Close()]
    for _ in range(3):
        rig.recorded(rig.chat().headers["x-countersign-id"])
    page = rig.http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    rows = page.text.splitlines()
    for status in (200, 500, 502):
        assert f'countersign_requests_total{{backend="b1",model="m",status="{status}"}} 1.0' in rows
    assert 'countersign_unrecorded_total{backend="b1",reason="no_answer"} 1.0' in rows
    assert 'countersign_overhead_duration_seconds_count{endpoint="chat"} 3.0' in rows
    assert "countersign_in_flight 0.0" in rows
    assert any(row.startswith("gen_ai_client_operation_time_to_first_chunk_seconds_bucket") for row in rows)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m", "/v1/verifications/x"])
@pytest.mark.parametrize(
    "key", [None, "", "Bearer", "Bearer wrong", "Basic sk-ann", "Bearer sk-ann2", "Bearer " + "x" * 9000]
)
def test_keys(make_rig: Callable[..., Rig], path: str, key: str | None) -> None:
    rig = make_rig(keys=KEYS)
    headers = {} if key is None else {"authorization": key}
    refused = rig.http.get(path, headers=headers)
    assert refused.status_code == 401
    assert _assert_shape(refused)["code"] == "invalid_api_key"
    relayed = rig.chat(headers=headers)
    assert (relayed.status_code, relayed.json()) == (401, refused.json())
    assert rig.backend.requests == []
    assert rig.http.get("/v1/models", headers={"authorization": "Bearer sk-ann"}).status_code == 200


def test_without_keys_only_this_machine() -> None:
    keys, host = Keys(()), {b"host": b"localhost"}
    assert keys.client(host, ("127.0.0.1", 1)).owner == hash_key("")
    assert keys.client(host | {b"authorization": b"Bearer k"}, ("::1", 1)).owner == hash_key("k")
    for peer in (("10.0.0.7", 1), ("testclient", 1), ("", 1), None):
        with pytest.raises(AuthenticationFailed):
            keys.client(host, peer)
    with pytest.raises(AuthenticationFailed):
        keys.client(host | {b"x-forwarded-for": b"127.0.0.1"}, ("127.0.0.1", 1))


def test_with_keys_peers_do_not_matter() -> None:
    keys = Keys([ClientKey(name="a", sha256=hash_key("k"))])
    assert keys.client({b"authorization": b"bearer k"}, ("10.0.0.7", 1)).owner == hash_key("k")
    with pytest.raises(AuthenticationFailed):
        keys.client({b"authorization": b"Bearer \xff\xfe"}, ("127.0.0.1", 1))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("::ffff:10.0.0.1", False),
        ("192.168.0.1", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_logs_hold_no_content(make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(keys=KEYS)
    lines = io.StringIO()
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    log.configure("DEBUG", lines)
    try:
        headers = {"authorization": "Bearer sk-ann", "x-request-id": "canary-request"}
        rig.backend.queue = [
            [wire.whole(wire.BODY)],
            wire.stream(),
            [wire.whole(b'{"error": {"message": "canary-error"}}', 500)],
            [wire.SSE_HEAD, wire.chunk(wire.ROLE), wire.chunk(b"data: canary-answer\n\n"), Close()],
        ]
        for stream in (False, True, False, True):
            response = rig.chat(headers=headers, stream=stream, messages=[{"role": "user", "content": "canary-prompt"}])
            rig.recorded(response.headers["x-countersign-id"])
        rig.http.post("/v1/chat/completions", content=b'{"canary-broken', headers=headers)
        rig.chat(headers={"authorization": "Bearer canary-key"})
        monkeypatch.setattr("proxy.relay.attempt.prepare", lambda *_, **__: 1 / 0)
        with contextlib.suppress(httpx.HTTPError):
            assert rig.chat(headers=headers, messages=[{"content": "canary-prompt"}]).status_code == 500
        root.handlers[0].flush()
    finally:
        logging.getLogger("proxy").setLevel(logging.NOTSET)
        root.handlers[:], root.level = before, level
    text = lines.getvalue()
    rows = [json.loads(line) for line in text.splitlines()]
    assert sum(row["message"] == "served" for row in rows) == 5
    assert any(row.get("error") == "ZeroDivisionError" for row in rows)
    for canary in ("canary", "sk-ann", "One two", "count", hash_key("sk-ann")):
        assert canary not in text.replace("countersign", "")
