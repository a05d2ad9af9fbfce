"""What a backend says behind its answer, or while nobody asks: the answer is whole, and the rest is nobody's."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from policies.settings import TimeoutSettings, hash_key
from proxy.relay.transport import AiohttpTransport, UpstreamRequest
from tests.proxy.conftest import Rig
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, PeerCloses, Script, Step, Until
from tests.support.waiting import PATIENCE, until, wait_until

STREAM = b"".join(map(wire.chunk, wire.FRAMES))
WHOLE = wire.whole(wire.BODY)
MORE = {
    "garbage": wire.LAST_CHUNK + b"garbage, and more of it\r\n\r\n",
    "another answer": wire.LAST_CHUNK + WHOLE,
    "a chunk that is none": b"zz\r\nhello\r\n",
    "events": wire.chunk(b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n') + wire.LAST_CHUNK,
    "a second end": wire.chunk(wire.DONE) + wire.LAST_CHUNK,
}
CUTS: dict[str, Callable[[bytes, bytes], list[Step]]] = {
    "in one segment": lambda head, rest: [head + rest],
    "after the head": lambda head, rest: [head, 0.02, rest],
    "in the head": lambda head, rest: [head[:-3], 0.02, head[-3:] + rest],
    "with the end": lambda head, rest: [head + rest[:300], 0.02, rest[300:]],
}


def _metric(rig: Rig) -> float:
    page = rig.http.get("/metrics").text
    return next(float(line.split()[1]) for line in page.splitlines() if line.startswith("countersign_unasked_total"))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("more", MORE)
def test_a_stream_that_is_whole_is_one(rig: Rig, more: str, cut: str) -> None:
    rig.backend.script = wire.stream()
    expected = rig.chat(stream=True).content
    rig.backend.script = CUTS[cut](wire.SSE_HEAD, STREAM + MORE[more])
    for _ in range(2):
        answer = rig.chat(stream=True)
        assert (answer.status_code, answer.content) == (200, expected)
        evidence = rig.evidence(answer.headers["x-countersign-id"])
        faults = ("after_end",) if more == "events" else ()
        assert (evidence.complete, evidence.faults, len(evidence.output_ids)) == (True, faults, 3)
    assert rig.proxy.services.backends.all[0].breaker.failures == 0


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.relay.streamed._FINISH_SECONDS", PATIENCE)


@pytest.mark.parametrize("mode", ["async", "inline"])
@pytest.mark.usefixtures("_patient")
def test_events_behind_the_end_are_nobodys(rig: Rig, mode: str) -> None:
    """However many they are, and whoever goes on reading."""
    more = wire.chunk(wire.CONTENT[0] * 20)
    rig.backend.script = [wire.SSE_HEAD + STREAM, *[more] * 2000]
    before = _metric(rig)
    with rig.worker("pass", hash_key("")):
        answer = rig.chat({"x-countersign-mode": mode}, stream=True)
    assert answer.content.count(b'"One"') == 1
    assert answer.content.endswith(wire.DONE)
    wait_until(lambda: rig.backend.busy == 0)
    assert len(rig.backend.last.sent) < 2000
    wait_until(lambda: _metric(rig) == before + 1)
    assert rig.evidence(answer.headers["x-countersign-id"]).complete


@pytest.mark.usefixtures("_patient")
def test_later_events_close_the_connection(rig: Rig) -> None:
    go = threading.Event()
    rig.backend.script = [wire.SSE_HEAD + STREAM, Until(go), wire.chunk(wire.CONTENT[0]), PeerCloses()]
    before = _metric(rig)
    answer = rig.chat(stream=True)
    go.set()
    assert answer.content.count(b'"One"') == 1
    assert rig.backend.last.peer_closed.wait(PATIENCE)
    wait_until(lambda: _metric(rig) == before + 1)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("more", ["garbage", "another answer"])
def test_so_is_a_body(rig: Rig, more: str, cut: str) -> None:
    rig.backend.script = [WHOLE]
    expected = rig.chat().content
    head, _, body = WHOLE.partition(b"\r\n\r\n")
    rest = MORE[more].removeprefix(wire.LAST_CHUNK)
    rig.backend.script = CUTS[cut](head + b"\r\n\r\n", body + rest)
    before = _metric(rig)
    for _ in range(2):
        answer = rig.chat()
        assert (answer.status_code, answer.content) == (200, expected)
    # Each had a connection of its own, except the first, which has that of the answer before.
    assert rig.backend.connections == 2
    assert _metric(rig) == before + 2


@pytest.mark.parametrize("unasked", [b"garbage", WHOLE.replace(b"One", b"Two"), b"HTTP/1.1 408 X\r\n\r\n"])
def test_what_nobody_asked_for_answers_nobody(rig: Rig, unasked: bytes) -> None:
    rig.backend.script = [WHOLE, 0.05, unasked, 0.05]
    assert rig.chat().status_code == 200
    wait_until(lambda: rig.backend.open == 0)
    rig.backend.script = [WHOLE]
    answer = rig.chat()
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "One two three"
    assert rig.backend.connections == 2


def test_a_flood_that_nobody_asked_for_is_cut_off(rig: Rig) -> None:
    rig.backend.script = [WHOLE, *[b"HTTP/1.1 200 X\r\ncontent-length: 0\r\n\r\n" * 1000] * 500]
    assert rig.chat().status_code == 200
    wait_until(lambda: rig.backend.open == 0)
    assert len(rig.backend.last.sent) < 400


def test_who_speaks_first_is_no_http_server(rig: Rig, backend: FakeBackend) -> None:
    async def first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE)
        await reader.read(1)
        writer.close()

    async def ask() -> None:
        server = await asyncio.start_server(first, "127.0.0.1", 0)
        transport = AiohttpTransport(TimeoutSettings())
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/chat/completions"
        waited = 0

        async def ready() -> None:
            nonlocal waited
            waited += 1

        try:
            response = await transport.send(UpstreamRequest(url, [], b"{}"), ready)
            response.close()
        finally:
            await transport.close()
            server.close()
        assert waited == 1

    asyncio.run(ask())


async def test_a_head_may_be_cut_anywhere() -> None:
    """Whatever follows it in the same segment, and whatever came before."""
    body = b'{"a": 1}'
    early = b"HTTP/1.1 103 X\r\nlink: a\r\n\r\n"
    texts = [wire.whole(body), early + wire.whole(body), wire.whole(body).replace(b"\r\n", b"\n")]
    places: list[tuple[bytes, int]] = [(text, at) for text in texts for at in range(1, len(text) - len(body) + 1)]
    asked = iter(places)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        text, at = next(asked)
        writer.write(text[:at])
        await writer.drain()
        await asyncio.sleep(0.001)
        writer.write(text[at:] + b"garbage")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    transport = AiohttpTransport(TimeoutSettings())
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/chat/completions"
    try:
        for text, at in places:
            response = await transport.send(UpstreamRequest(url, [("content-length", "2")], b"{}"))
            got = b""
            while part := await response.read():
                got += part
            assert (response.status, got) == (200, body), (text, at)
        await until(lambda: transport.unasked == len(places))
    finally:
        await transport.close()
        server.close()


def test_what_came_before_it_broke_off_is_passed_on(rig: Rig) -> None:
    """All of it, however little time there was to read it."""
    frames = [wire.ROLE, *wire.CONTENT]
    script: Script = [wire.SSE_HEAD + b"".join(map(wire.chunk, frames)) + b"zz\r\n", Close()]
    rig.backend.script = script
    answer = rig.chat(stream=True)
    assert answer.status_code == 200
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    said: list[Any] = [event["choices"][0]["delta"].get("content") for event in events if "choices" in event]
    assert said == ["", "One", " two", " three"]
    assert "error" in events[-1]
    assert len(rig.evidence(answer.headers["x-countersign-id"]).output_ids) == 3
