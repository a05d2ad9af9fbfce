"""A stream has an end: what was asked for bounds its bytes, whatever they are; honest ones are far from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import httpx
import pytest

from tests.proxy.conftest import Rig
from tests.support import wire
from tests.support.fake_backend import PeerCloses, Step
from tests.support.waiting import PATIENCE

CHAT = "/v1/chat/completions"
KINDS = {
    "events": b"data: {}\n\n" * 800,
    "comments": b": abc\n\n" * 1000,
    "ids": b"id: 1\n\n" * 1000,
    "retries": b"retry: 1\n\n" * 800,
    "blank lines": b"\n" * 8000,
    "no json": b"data: x\n\n" * 900,
    "roles": wire.BARE_CONTENT[0].replace(b"One", b"") * 40,
    "long comments": b": " + b"x" * 8000 + b"\n\n",
}
HOUR = [b": keep-alive\n\n" * 1000] * 36
"""Ten a second for an hour."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"_BASE": 64 * 1024, "_PER_TOKEN": 2048, "_PER_PROMPT_BYTE": 128}.items():
        monkeypatch.setattr(f"proxy.tap.allowed.{name}", size)


def _streamed(rig: Rig, path: str, **fields: Any) -> tuple[int, bytes, str]:
    body = {"model": "m", "messages": [], "input": "x", "stream": True} | fields
    with rig.http.stream("POST", path, json=body) as response:
        return response.status_code, response.read(), response.headers["x-countersign-id"]


def _endless(first: bytes, data: bytes) -> list[Step]:
    return [wire.SSE_HEAD, wire.chunk(first), *[wire.chunk(data)] * 1500, PeerCloses()]


@pytest.mark.parametrize("kind", KINDS)
def test_an_endless_stream_ends(rig: Rig, kind: str) -> None:
    rig.backend.script = _endless(wire.ROLE, KINDS[kind])
    status, text, id = _streamed(rig, CHAT, max_tokens=10)
    assert status == 200
    last = json.loads(text.rstrip().rpartition(b"\n")[2].removeprefix(b"data: "))
    assert last["error"]["code"] == "too_large"
    assert wire.DONE not in text
    assert len(text) < 500_000
    assert "too_large" in rig.evidence(id).faults
    assert rig.backend.last.peer_closed.wait(PATIENCE)


def test_one_that_says_nothing_is_an_error(rig: Rig) -> None:
    rig.backend.script = _endless(b": first\n\n", KINDS["long comments"])
    status, text, id = _streamed(rig, CHAT, max_tokens=10)
    assert (status, b'"too_large"' in text) == (200, True)
    assert "too_large" in rig.evidence(id).faults


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/embeddings"])
@pytest.mark.parametrize("kind", ["text/event-stream", "text/plain", "audio/wav"])
def test_of_other_endpoints_too(make_rig: Callable[..., Rig], path: str, kind: str) -> None:
    rig = make_rig(bounds={"answer_bytes": 500_000})
    data = b"\x01" * 8000 if kind == "audio/wav" else KINDS["long comments"]
    rig.backend.script = [wire.head(200, kind, "connection: close"), *[data] * 1500]
    body = {"model": "m", "input": "x", "stream": True, "max_tokens": 10, "max_output_tokens": 10}
    got = b""
    breaks: AbstractContextManager[Any] = nullcontext()
    if kind == "audio/wav":
        breaks = pytest.raises(httpx.RemoteProtocolError)
    with breaks, rig.http.stream("POST", path, json=body) as response:
        for part in response.iter_raw():
            got += part
    assert (b"too large" in got) is (kind != "audio/wav")
    assert len(got) < 1_000_000
    assert rig.backend.last.peer_closed.wait(PATIENCE)


def test_an_hour_of_keep_alive_comments_is_none(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.tap.allowed._BASE", 4 * 1024 * 1024)
    rig.backend.script = [wire.SSE_HEAD, *map(wire.chunk, HOUR), *wire.stream()[1:]]
    _, text, id = _streamed(rig, CHAT, max_tokens=1)
    assert text.endswith(wire.DONE)
    assert text.count(b": keep-alive\n\n") == 36_000
    assert "too_large" not in rig.evidence(id).faults
