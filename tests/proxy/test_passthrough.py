"""Endpoints that are relayed unverified: who may ask, what goes up, and what is on record of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import cast

import httpx
import msgspec
import openai
import pytest

from policies.settings import hash_key
from policies.unit import Unit
from tests.proxy.conftest import Rig
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, PeerCloses
from tests.support.waiting import PATIENCE
from verifier_pool.link.queue import VERIFY_QUEUE, units_key

PATHS = ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/tokenize", "/detokenize")


def _last_unit(rig: Rig, backend: str = "b1") -> Unit:
    (told,) = cast("list[bytes]", rig.redis.lrange(units_key(backend), -1, -1))
    return msgspec.json.decode(told, type=Unit)


@pytest.mark.parametrize("path", PATHS)
def test_on_record_as_unverified(rig: Rig, path: str) -> None:
    rig.backend.script = [wire.whole(b'{"model": "served", "x": 1}')]
    queued = rig.redis.llen(f"rq:queue:{VERIFY_QUEUE}")
    response = rig.http.post(path, json={"model": "m", "input": "x"})
    assert response.status_code == 200
    assert response.json() == {"model": "m", "x": 1}
    assert rig.backend.last.line == f"POST {path} HTTP/1.1".encode()
    assert json.loads(rig.backend.last.body) == {"model": "served", "input": "x"}
    assert (response.headers["x-countersign-verdict"], response.headers["x-countersign-reason"]) == (
        "unverified",
        "endpoint",
    )
    id = response.headers["x-countersign-id"]
    verdict = rig.verdict(id)
    assert (verdict["verdict"], verdict["reasons"]) == ("unverified", ["endpoint"])
    assert rig.http.get(f"/v1/verifications/{id}").json()["reasons"] == ["endpoint"]
    unit = _last_unit(rig)
    assert (unit.id, unit.undecided, unit.blame) == (id, "endpoint", "request")
    assert rig.redis.llen(f"rq:queue:{VERIFY_QUEUE}") == queued
    assert id not in rig.open_ids()


@pytest.mark.parametrize("mode", ["async", "inline"])
def test_nobody_waits_for_a_verdict_that_will_not_come(rig: Rig, mode: str) -> None:
    rig.backend.script = [wire.whole(b'{"x": 1}')]
    response = rig.http.post(
        "/v1/embeddings", json={"model": "m"}, headers={"x-countersign-mode": mode}, timeout=PATIENCE
    )
    assert response.json() == {"x": 1}


def test_the_openai_client(rig: Rig) -> None:
    body = {"object": "list", "model": "served", "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}]}
    rig.backend.script = [wire.whole(json.dumps(body | {"usage": {"prompt_tokens": 1, "total_tokens": 1}}).encode())]
    with openai.OpenAI(base_url=f"{rig.proxy.url}/v1", api_key="x", max_retries=0) as client:
        found = client.embeddings.create(model="m", input="x", encoding_format="float")
    assert (found.model, found.data[0].embedding) == ("m", [0.5, 1.0])


def test_the_messages_clients_key_and_version(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(keys=[{"name": "k", "sha256": hash_key("sk-mine")}])
    rig.backend.script = [wire.whole(b"{}")]
    headers = {"x-api-key": "sk-mine", "anthropic-version": "2023-06-01", "anthropic-beta": "b"}
    assert rig.http.post("/v1/messages", json={"model": "m"}, headers=headers).status_code == 200
    assert rig.backend.last.headers[b"anthropic-version"] == b"2023-06-01"
    assert b"sk-mine" not in rig.backend.last.raw_headers
    assert rig.http.post("/v1/messages", json={"model": "m"}, headers={"x-api-key": "other"}).status_code == 401
    both = {"x-api-key": "sk-mine", "authorization": "Bearer other"}
    assert rig.http.post("/v1/messages", json={"model": "m"}, headers=both).status_code == 401
    assert rig.http.post("/v1/messages", json={"model": "m"}).status_code == 401
    assert rig.http.get("/v1/models", headers={"x-api-key": "sk-mine"}).status_code == 200
    assert rig.http.get("/v1/models", headers={"x-api-key": "other"}).status_code == 401
    id = rig.http.post("/v1/messages", json={"model": "m"}, headers=headers).headers["x-countersign-id"]
    assert rig.http.get(f"/v1/verifications/{id}", headers={"x-api-key": "sk-mine"}).json()["verdict"] == "unverified"


@pytest.mark.parametrize(
    ("asked", "goes_up"),
    [
        ("?beta=true&x=%20%2F", "?beta=true&x=%20%2F"),
        ("?", ""),
        ("?a=b?c=%C3%A9", "?a=b?c=%C3%A9"),
        ("?key=sk-m%69ne&beta=true", ""),
    ],
)
def test_the_query_goes_up_but_for_keys(make_rig: Callable[..., Rig], asked: str, goes_up: str) -> None:
    rig = make_rig(keys=[{"name": "me", "sha256": hash_key("sk-mine")}])
    rig.backend.script = [wire.whole(b"{}")]
    headers = {"authorization": "Bearer sk-mine"}
    for path, up in (("/v1/messages", goes_up), ("/v1/chat/completions", "")):
        rig.http.post(path + asked, json={"model": "m", "messages": []}, headers=headers)
        assert rig.backend.last.line == f"POST {path}{up} HTTP/1.1".encode()
    long = rig.http.post("/v1/messages?" + "a" * 3000, json={"model": "m"}, headers=headers)
    assert (long.status_code, "error" in long.json()) == (400, True)


def test_only_what_the_settings_list(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(relay={"passthrough": ["/v1/rerank"]})
    rig.backend.script = [wire.whole(b"{}")]
    assert rig.http.post("/v1/rerank", json={"model": "m"}).status_code == 200
    assert rig.http.post("/v1/embeddings", json={"model": "m"}).status_code == 404
    assert rig.http.get("/v1/rerank").status_code == 405


@pytest.mark.parametrize("body", [b"", b"[]", b'{"model": 1}', b"{}", b'{"input": "x"}'])
def test_bad_requests(rig: Rig, body: bytes) -> None:
    response = rig.http.post("/v1/embeddings", content=body)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert rig.backend.requests == []


@pytest.mark.parametrize(
    ("status", "reason", "blame"),
    [(404, "client_error", "request"), (429, "no_answer", "backend"), (500, "endpoint", "request")],
)
def test_refusals(rig: Rig, status: int, reason: str, blame: str) -> None:
    rig.backend.script = [wire.whole(b'{"error": {"message": "no"}}', status)]
    response = rig.http.post("/v1/embeddings", json={"model": "m"})
    assert (response.status_code, response.content) == (status, b'{"error": {"message": "no"}}')
    rig.verdict(response.headers["x-countersign-id"])
    assert (_last_unit(rig).undecided, _last_unit(rig).blame) == (reason, blame)


def test_a_client_that_leaves(rig: Rig) -> None:
    rig.backend.script = [wire.SSE_HEAD, wire.chunk(b'data: {"type":"x"}\n\n'), PeerCloses()]
    with pytest.raises(httpx.ReadTimeout):
        rig.http.post("/v1/responses", json={"model": "m", "stream": True}, timeout=1.0)
    assert rig.backend.last.peer_closed.wait(PATIENCE)
    assert rig.open_ids() == [] or _last_unit(rig).undecided in ("endpoint", "client_left")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_each_backend_that_was_asked_has_a_record_of_its_own(
    make_rig: Callable[..., Rig], second: FakeBackend, path: str
) -> None:
    rig = make_rig(second.url)
    rig.redis.delete(units_key("b1"), units_key("b2"))
    rig.stand("b2", "suspect")
    rig.stand("b1", "trusted")
    answers = {"/v1/chat/completions": wire.BODY, "/v1/embeddings": b'{"model":"served"}'}
    second.script = [wire.whole(answers[path])]
    rig.backend.script = [Close()]
    seen = set()
    for _ in range(4):
        response = rig.http.post(path, json={"model": "m", "messages": []})
        assert response.status_code == 200
        seen.add(response.headers["x-countersign-id"])
        rig.recorded(response.headers["x-countersign-id"])
    assert len(seen) == 4
    assert rig.backend.requests
    told = [
        msgspec.json.decode(item, type=Unit) for item in cast("list[bytes]", rig.redis.lrange(units_key("b1"), 0, -1))
    ]
    assert {(unit.undecided, unit.blame) for unit in told} == {("no_answer", "backend")}
    assert len(told) == len({unit.id for unit in told} - seen) == len(rig.backend.requests)


def test_retries_can_be_turned_off(make_rig: Callable[..., Rig], second: FakeBackend) -> None:
    rig = make_rig(second.url, relay={"retries": 0})
    second.script = rig.backend.script = [wire.whole(b'{"error": {"message": "busy"}}', 503)]
    assert {rig.chat().status_code for _ in range(3)} == {503}
    assert len(rig.backend.requests) + len(second.requests) == 3
