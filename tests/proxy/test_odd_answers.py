"""Answers that are HTTP, and that no vLLM gives."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Any

import openai
import pytest
import zstandard

from policies.settings import hash_key
from tests.proxy.conftest import MESSAGES, Rig
from tests.proxy.raw import WHOLE, Wire
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, Script
from tests.support.waiting import wait_until


def test_no_content_has_no_length(rig: Rig) -> None:
    rig.backend.script = [b"HTTP/1.1 204 X\r\n\r\n"]
    with Wire(rig) as client:
        client.send([WHOLE])
        head, _, body = client.rest().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 204 ")
    assert b"content-length" not in head.lower()
    assert b"transfer-encoding" not in head.lower()
    assert body == b""


def test_a_request_that_has_arrived_is_not_sent_again(rig: Rig) -> None:
    """On a kept-alive connection a head came, only an informational one, and then its end."""
    rig.backend.script = [wire.whole(wire.BODY)]
    assert rig.chat().status_code == 200
    rig.backend.script = [b"HTTP/1.1 103 Early Hints\r\n\r\n", 0.05, Close()]
    assert rig.chat().status_code == 502
    assert len(rig.backend.requests) == 2
    assert len({each.connection for each in rig.backend.requests}) == 1


STREAM = b"".join(wire.FRAMES)
NO_JSON: dict[str, Script] = {
    "a stream": wire.stream(),
    "a stream in one": [wire.whole(STREAM, 200, "text/event-stream")],
    "a stream that is called JSON": [wire.whole(STREAM)],
    "a page": [wire.whole(b"<html>busy</html>", 200, "text/html")],
    "half of it": [wire.whole(wire.BODY[:-1])],
    "more than it": [wire.whole(wire.BODY + b"x")],
    "a list of it": [wire.whole(b"[" + wire.BODY + b"]")],
}


@pytest.mark.parametrize("kind", NO_JSON)
def test_what_is_no_answer_to_who_does_not_stream_is_an_error(make_rig: Callable[..., Rig], kind: str) -> None:
    rig = make_rig(relay={"retries": 0})
    rig.backend.script = NO_JSON[kind]
    response = rig.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "invalid_json")
    assert response.headers["content-type"] == "application/json"
    for hidden in (b"served", b"token_id", b"logprob", b"One"):
        assert hidden not in response.content
    evidence = rig.evidence(response.headers["x-countersign-id"])
    assert (evidence.faults, evidence.complete) == (("invalid_json",), False)
    assert rig.proxy.services.backends.all[0].breaker.failures == 1


def test_another_backend_is_asked_for_one(make_rig: Callable[..., Rig], second: FakeBackend) -> None:
    rig = make_rig(second.url, standing={"suspect_share": 0})
    rig.stand("b2", "suspect")
    rig.backend.script, second.script = NO_JSON["a stream"], [wire.whole(wire.BODY)]
    response = rig.chat()
    assert response.json()["choices"][0]["message"]["content"] == "One two three"
    assert rig.evidence(response.headers["x-countersign-id"]).backend == "b2"


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json", "text/plain"])
def test_a_stream_is_one_under_any_name(rig: Rig, kind: str) -> None:
    rig.backend.script = [wire.whole(STREAM, 200, kind)]
    with openai.OpenAI(base_url=f"{rig.proxy.url}/v1", api_key="k", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(model="m", messages=MESSAGES, stream=True)
        chunks: list[Any] = list(raw.parse())
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == "One two three"
    assert {chunk.model for chunk in chunks} == {"m"}
    assert all(choice.logprobs is None for chunk in chunks for choice in chunk.choices)
    evidence = rig.evidence(raw.headers["x-countersign-id"])
    assert (evidence.faults, evidence.complete) == ((), True)
    assert evidence.output_ids.tolist() == [11, 12, 13]


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
@pytest.mark.parametrize("mode", ["async", "inline"])
def test_a_whole_answer_to_a_stream_is_one_under_any_name(rig: Rig, kind: str, mode: str) -> None:
    rig.backend.script = [wire.whole(wire.BODY, 200, kind)]
    with rig.worker("pass", hash_key("")):
        response = rig.chat({"x-countersign-mode": mode}, stream=True)
    assert (response.status_code, response.headers["content-type"]) == (200, kind)
    shown = response.json()
    assert shown["model"] == "m"
    assert shown["choices"][0]["message"]["content"] == "One two three"
    assert (shown["choices"][0]["logprobs"], shown["choices"][0]["token_ids"]) == (None, None)
    evidence = rig.evidence(response.headers["x-countersign-id"])
    assert (evidence.faults, evidence.complete) == ((), True)


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
@pytest.mark.parametrize("stream", [False, True])
def test_compressed_streams_without_anything_in_them_are_no_answer(
    make_rig: Callable[..., Rig], coding: str, stream: bool
) -> None:
    """And come to an end with what was read, however many they are."""
    rig = make_rig(relay={"retries": 0})
    empty = gzip.compress(b"") if coding == "gzip" else zstandard.compress(b"")
    kind = "text/event-stream" if stream else "application/json"
    head = wire.head(200, kind, f"content-encoding: {coding}", "connection: close")
    rig.backend.script = [head, *[empty * 100_000] * 50]
    response = rig.chat(stream=stream)
    assert response.status_code == 502
    wait_until(lambda: not rig.backend.busy)
    assert len(rig.backend.last.sent) < 50
    evidence = rig.evidence(response.headers["x-countersign-id"])
    assert (evidence.complete, len(evidence.output_ids)) == (False, 0)
