"""What the client gets and what Redis gets, for answers good and bad."""

from __future__ import annotations

import gzip
import json
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import zstandard

from proxy.tap import prepare
from proxy.tap.types import Prepared
from tests.proxy.conftest import CHAT, MESSAGES, Rig
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, PeerCloses, Step, Until
from tests.support.waiting import PATIENCE
from verifier_pool import RQ_PREFIX


def _texts(body: bytes) -> str:
    text = ""
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:]).get("choices", []):
                text += choice["delta"].get("content") or ""
    return text


def test_whole_answer(rig: Rig) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    response = rig.chat()
    assert response.status_code == 200
    answer = response.json()
    assert answer["choices"][0]["message"]["content"] == "One two three"
    assert answer["model"] == "m"
    assert answer["choices"][0].get("logprobs") is None
    assert answer["choices"][0].get("token_ids") is None
    assert "countersign" not in answer
    id = response.headers["x-countersign-id"]
    evidence = rig.evidence(id)
    np.testing.assert_array_equal(evidence.output_ids, [11, 12, 13])
    assert (evidence.id, evidence.backend, evidence.model, evidence.runtime) == (id, "b1", "m", "vllm-0.32-v2")
    assert evidence.complete
    assert evidence.faults == ()
    assert evidence.total_seconds is not None
    assert rig.queued(id)
    assert rig.redis.hget(f"{RQ_PREFIX}:job:{id}", "timeout") == b"300"
    assert rig.open_until(id) > time.time() + 800


def test_stream(rig: Rig) -> None:
    rig.backend.script = wire.stream()
    response = rig.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert _texts(response.content) == "One two three"
    assert response.content.endswith(wire.DONE)
    assert b"usage" not in response.content
    evidence = rig.evidence(response.headers["x-countersign-id"])
    np.testing.assert_array_equal(evidence.output_ids, [11, 12, 13])
    np.testing.assert_array_equal(evidence.prompt_ids, wire.PROMPT_IDS)
    assert evidence.stream
    assert evidence.complete
    assert evidence.first_token_seconds is not None


def test_openai_client(rig: Rig) -> None:
    rig.backend.script = lambda request: (
        wire.stream() if json.loads(request.body).get("stream") else [wire.whole(wire.BODY)]
    )
    with openai.OpenAI(base_url=f"{rig.proxy.url}/v1", api_key="whatever", max_retries=0) as client:
        answer = client.chat.completions.create(model="m", messages=MESSAGES)
        assert answer.choices[0].message.content == "One two three"
        parts = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == "One two three"
        assert [model.id for model in client.models.list()] == ["m"]


def test_each_chunk_goes_on_before_the_next_arrives(rig: Rig) -> None:
    seen = [threading.Event() for _ in wire.CONTENT]
    steps: list[Step] = [wire.SSE_HEAD, wire.chunk(wire.ROLE)]
    for frame, event in zip(wire.CONTENT, seen, strict=True):
        steps += [wire.chunk(frame), Until(event)]
    rig.backend.script = [*steps, *map(wire.chunk, wire.FRAMES[-3:]), wire.LAST_CHUNK]
    with rig.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        pieces = response.iter_raw()
        got = b""
        for (_, text), event in zip(wire.TOKENS, seen, strict=True):
            while text.encode() not in got:
                got += next(pieces)
            event.set()
        assert b"".join([got, *pieces]).endswith(wire.DONE)


def test_evidence_is_asked_for_and_the_key_stays_here(rig: Rig) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    rig.chat(
        headers={
            "authorization": "Bearer sk-secret",
            "cookie": "a=b",
            "x-countersign-mode": "async",
            "x-data-parallel-rank": "3",
            "x-vllm-priority": "1",
            "x-session-id": "s",
            "x-request-id": "req-7",
            "proxy-authorization": "Basic x",
            "traceparent": "00-1-2-01",
            "tracestate": "a=b",
            "baggage": "c=d",
        }
    )
    got = rig.backend.last
    assert json.loads(got.body)["model"] == "served"
    assert json.loads(got.body)["logprobs"] is True
    assert sorted(got.headers) == sorted(
        b"host content-type content-length accept accept-encoding user-agent x-request-id".split()
    )
    assert got.headers[b"accept-encoding"] == b"identity"
    assert b"secret" not in got.raw_headers


def test_headers_on_the_way_back(rig: Rig) -> None:
    rig.backend.script = [
        wire.whole(
            wire.BODY,
            200,
            "application/json",
            "x-countersign-id: forged",
            "X-Countersign-Verdict: pass",
            "set-cookie: a=b",
            "x-ratelimit-remaining: 3",
            "connection: keep-alive, x-private",
            "x-private: 1",
            "location: http://elsewhere/",
            "server: vllm",
            "x-request-id: theirs",
        )
    ]
    response = rig.chat(headers={"x-request-id": "mine"})
    assert len(response.headers.get_list("x-countersign-id")) == 1
    assert response.headers["x-countersign-id"] != "forged"
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["x-ratelimit-remaining"] == "3"
    assert not {"x-countersign-verdict", "set-cookie", "x-private", "location", "server"} & set(response.headers)
    assert rig.chat().headers["x-request-id"] == "theirs"


def test_dies_mid_stream(rig: Rig) -> None:
    rig.backend.script = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:3]), Close()]
    response = rig.chat(stream=True)
    assert _texts(response.content) == "One two"
    *_, last = response.content.rstrip().split(b"\n\n")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_closed"
    assert b"[DONE]" not in response.content
    evidence = rig.evidence(response.headers["x-countersign-id"])
    np.testing.assert_array_equal(evidence.output_ids, [11, 12])
    assert "upstream_closed" in evidence.faults
    assert not evidence.complete


def test_resets_mid_stream_raises_in_the_sdk(rig: Rig) -> None:
    rig.backend.script = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:3]), 0.05, Close(reset=True)]
    with openai.OpenAI(base_url=f"{rig.proxy.url}/v1", api_key="x", max_retries=0) as client:
        parts = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError):
            list(parts)


def test_dies_mid_body(rig: Rig) -> None:
    rig.backend.script = [wire.whole(wire.BODY)[:-50], Close()]
    response = rig.chat()
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "upstream_failed"
    evidence = rig.evidence(response.headers["x-countersign-id"])
    assert "upstream_closed" in evidence.faults
    assert not evidence.complete


def test_dies_before_an_answer(rig: Rig) -> None:
    rig.backend.script = [Close()]
    response = rig.chat(stream=True)
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "upstream_failed"
    verdict = rig.verdict(response.headers["x-countersign-id"])
    assert (verdict["verdict"], verdict["reasons"]) == ("unverified", ["no_answer"])
    assert len(rig.backend.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_status_500_passes_and_is_marked(rig: Rig, stream: bool) -> None:
    body = b'{"error": {"message": "Out of range float values", "type": "Internal", "param": null, "code": 500}}'
    rig.backend.script = [wire.whole(body, 500)]
    response = rig.chat(stream=stream)
    assert response.status_code == 500
    assert response.content == body
    evidence = rig.evidence(response.headers["x-countersign-id"])
    assert evidence.faults == ("upstream_error",)
    assert not evidence.complete


@pytest.mark.parametrize("status", [301, 307, 304])
def test_redirects_lead_nobody_past_the_proxy(rig: Rig, status: int) -> None:
    rig.backend.script = [wire.head(status, "text/plain", "location: http://evil.invalid/", "content-length: 0")]
    response = rig.chat()
    assert response.status_code == 502
    assert "location" not in response.headers


def test_no_logprobs(rig: Rig) -> None:
    frames = (wire.ROLE, *wire.BARE_CONTENT, wire.FINISH, wire.USAGE, wire.DONE)
    rig.backend.script = wire.stream(frames)
    response = rig.chat(stream=True)
    assert _texts(response.content) == "One two three"
    assert response.content.endswith(wire.DONE)
    assert {"no_logprobs", "no_token_ids"} <= set(rig.evidence(response.headers["x-countersign-id"]).faults)


@pytest.mark.parametrize("value", [b"NaN", b"-Infinity", b"Infinity"])
@pytest.mark.parametrize("stream", [False, True])
def test_numbers_json_has_no_word_for(rig: Rig, value: bytes, stream: bool) -> None:
    if stream:
        bad = wire.CONTENT[1].replace(b'"logprob": -0.1', b'"logprob": ' + value)
        rig.backend.script = wire.stream((wire.ROLE, wire.CONTENT[0], bad, *wire.FRAMES[3:]))
    else:
        rig.backend.script = [wire.whole(wire.BODY.replace(b'"logprob": -0.1', b'"logprob": ' + value))]
    response = rig.chat(stream=stream)
    assert response.status_code == 200
    assert b"One" in response.content
    evidence = rig.evidence(response.headers["x-countersign-id"])
    assert {"bad_logprobs", "invalid_json"} & set(evidence.faults)


def test_invalid_json(rig: Rig) -> None:
    rubbish = b'{"choices": [{"index": 0, "message": '
    rig.backend.script = wire.stream((wire.ROLE, wire.CONTENT[0], b"data: " + rubbish + b"\n\n", *wire.FRAMES[2:]))
    response = rig.chat(stream=True)
    assert response.status_code == 200
    assert rubbish in response.content
    assert "invalid_json" in rig.evidence(response.headers["x-countersign-id"]).faults


def test_wrong_content_type_passes_as_it_is(rig: Rig) -> None:
    page = b"<html>busy</html>"
    rig.backend.script = [wire.whole(page, 200, "text/html")]
    response = rig.chat(stream=True)
    assert response.content == page
    assert response.headers["content-type"] == "text/html"
    assert "upstream_error" in rig.evidence(response.headers["x-countersign-id"]).faults


def test_not_even_http(rig: Rig) -> None:
    rig.backend.script = [b"\x00\xff\x00 nothing\r\n\r\n", Close()]
    response = rig.chat()
    assert response.status_code == 502
    assert rig.verdict(response.headers["x-countersign-id"])["reasons"] == ["no_answer"]


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", zstandard.compress)],
)
def test_compressed_although_not_asked(rig: Rig, encoding: str, compress: Callable[[bytes], bytes]) -> None:
    rig.backend.script = [wire.whole(compress(wire.BODY), 200, "application/json", f"content-encoding: {encoding}")]
    response = rig.chat()
    assert response.json()["choices"][0]["message"]["content"] == "One two three"
    assert "content-encoding" not in response.headers
    assert rig.evidence(response.headers["x-countersign-id"]).faults == ()


@pytest.mark.parametrize("encoding", ["br", "gzip"])
def test_compression_that_cannot_be_undone(rig: Rig, encoding: str) -> None:
    rig.backend.script = [wire.whole(b"not compressed", 200, "application/json", f"content-encoding: {encoding}")]
    assert rig.chat().status_code == 502


def test_second_backend_takes_over_before_the_first_byte(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("http://127.0.0.1:9")
    rig.backend.script = [wire.whole(wire.BODY)]
    for _ in range(4):
        response = rig.chat()
        assert response.status_code == 200
        assert rig.evidence(response.headers["x-countersign-id"]).backend == "b1"
    response = rig.chat(headers={"x-countersign-backend": "b2"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "backend_unavailable"
    assert rig.verdict(response.headers["x-countersign-id"])["backend"] == "b2"
    assert rig.chat(headers={"x-countersign-backend": "b3"}).status_code == 400


def test_a_stale_connection_is_replaced_silently(rig: Rig) -> None:
    rig.backend.queue = [[wire.whole(wire.BODY)], [Close()], [wire.whole(wire.BODY)]]
    assert rig.chat().status_code == 200
    assert rig.chat().status_code == 200
    assert [request.connection for request in rig.backend.requests] == [1, 1, 2]


def test_connections_are_used_again(rig: Rig) -> None:
    rig.backend.script = lambda request: (
        wire.stream() if json.loads(request.body).get("stream") else [wire.whole(wire.BODY)]
    )
    for stream in (False, True, False, True, True):
        assert rig.chat(stream=stream).status_code == 200
    assert rig.backend.connections == 1


@pytest.mark.parametrize("stream", [False, True])
def test_silence_before_the_first_byte(make_rig: Callable[..., Rig], stream: bool) -> None:
    rig = make_rig(timeouts={"first_byte": 0.3})
    rig.backend.script = [PeerCloses()]
    response = rig.chat(stream=stream)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "upstream_timeout"
    assert rig.backend.last.peer_closed.wait(PATIENCE)


def test_silence_between_frames(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(timeouts={"idle": 0.3})
    rig.backend.script = [wire.SSE_HEAD + b"".join(map(wire.chunk, wire.FRAMES[:3])), PeerCloses()]
    response = rig.chat(stream=True)
    assert b"upstream_timeout" in response.content
    assert b"[DONE]" not in response.content
    evidence = rig.evidence(response.headers["x-countersign-id"])
    assert "upstream_timeout" in evidence.faults
    np.testing.assert_array_equal(evidence.output_ids, [11, 12])


def test_a_stream_without_end(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(timeouts={"total": 0.5})
    endless: list[Step] = [0.05, wire.chunk(wire.CONTENT[0])]
    rig.backend.script = [wire.SSE_HEAD, wire.chunk(wire.ROLE), *endless * 2000]
    response = rig.chat(stream=True)
    assert b"upstream_timeout" in response.content


def test_held_open_after_done(rig: Rig) -> None:
    rig.backend.script = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES), PeerCloses()]
    response = rig.chat(stream=True)
    assert response.content.endswith(wire.DONE)
    assert rig.evidence(response.headers["x-countersign-id"]).complete


def test_a_line_without_end(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(bounds={"line_bytes": 10_000})
    rig.backend.script = [wire.SSE_HEAD, wire.chunk(wire.ROLE), *[wire.chunk(b"x" * 5000)] * 50, 5.0]
    response = rig.chat(stream=True)
    assert b'"error"' in response.content
    assert rig.backend.last.peer_closed.wait(PATIENCE)
    assert "line_too_long" in rig.evidence(response.headers["x-countersign-id"]).faults


def test_limits_on_concurrency(backend: FakeBackend, make_rig: Callable[..., Rig]) -> None:
    crowded = {"name": "b1", "url": backend.url, "model": "m", "max_concurrency": 1}
    rig = make_rig(backends=[crowded], routing={"queue": 0})
    rig.backend.script = wire.stream(pause=0.1)
    with rig.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        refused = rig.chat()
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        response.read()
    # The slot is free once the server has ended its side, a moment after the client's.
    assert 200 in (rig.chat(stream=True).status_code for _ in range(200))


def test_a_large_body_holds_up_nobody(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, done = threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Prepared:
        reading.set()
        assert done.wait(PATIENCE)
        return prepare(*arguments, **options)

    monkeypatch.setattr("proxy.relay.attempt.prepare", slow)
    rig.backend.script = [wire.whole(wire.BODY)]
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(rig.chat, padding="x" * 300_000)
        assert reading.wait(PATIENCE)
        assert httpx.get(f"{rig.proxy.url}/healthz", timeout=PATIENCE).status_code == 200
        done.set()
        assert large.result().status_code == 200
