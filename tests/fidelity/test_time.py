"""Cases 61 to 65: silence, time-outs, a thousand streams, the end of the process, slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fidelity.frames import BODY, DONE, FINISH, ONE, PATHS, ROLE, STREAM, STREAMS, begun, chat, script
from tests.fidelity.gateway import CHAT, MESSAGES, Gateway, Gateways
from tests.fidelity.meaning import assert_answer, assert_begins, assert_same, comments_of, events, notes
from tests.fidelity.timing import Lateness, timing
from tests.support import wire
from tests.support.fake_backend import Close, FakeBackend, PeerCloses, Step, Until
from tests.support.waiting import PATIENCE, wait_until

ERROR = b'{"error": {"message":"no","type":"BadRequestError","param":null,"code":400}}'
TRIES = 20
MANY = 1000
BEGUN = 10.0
"""Seconds after which 99 in a hundred of them have their first bytes, where gateway, client and upstream share two
cores."""
LARGE = chat('{"content":"' + "x" * 60_000 + '"}')


def _without_comments(body: bytes) -> bytes:
    return b"".join(event + b"\n\n" for event in body.split(b"\n\n") if event and not event.startswith(b":"))


def _assert_closed(upstream: FakeBackend) -> None:
    """Asserts that the latest request's connection is closed; a busy machine may not have begun to read it."""
    wait_until(lambda: upstream.requests)
    assert upstream.last.peer_closed.wait(PATIENCE)


def _steady(gateway: Gateway, body: bytes) -> None:
    """Asserts that an answer comes as it is, in the pace that its upstream keeps. A machine that stands still for
    longer than the gateway waits makes a silence of its own, so it is asked for again."""
    for _ in range(TRIES):
        if (got := gateway.ask(stream=True).body) == body:
            return
    assert_same(got, body)


@pytest.fixture
def patient(gateways: Gateways) -> tuple[Gateway, float]:
    """The gateway that sends comments, and after how many seconds of silence it does."""
    return gateways.variant("keepalive"), gateways.keepalive


@pytest.mark.cases(61)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("silent", ["before headers", "before the first event"])
def test_comments_while_a_client_waits(
    patient: tuple[Gateway, float], upstream: FakeBackend, path: str, silent: str
) -> None:
    gateway, after = patient
    steps = script(STREAMS[path])
    silence = 4.5 * after
    upstream.script = [silence, *steps] if silent == "before headers" else [steps[0], silence, *steps[1:]]
    answer = gateway.ask(path, stream=True)
    assert answer.status == 200
    assert answer.header("content-type").startswith("text/event-stream")
    assert answer.body.startswith(b":")
    assert len(comments_of(answer.body)) >= 2
    assert_same(_without_comments(answer.body), b"".join(STREAMS[path]))
    assert answer.whole


@pytest.mark.cases(61)
def test_comments_never_cut_an_event(patient: tuple[Gateway, float], upstream: FakeBackend) -> None:
    gateway, after = patient
    data = b"".join(STREAM)
    cut = data.index(b"One") + 1
    upstream.script = [wire.SSE_HEAD, wire.chunk(data[:cut]), 3.5 * after, wire.chunk(data[cut:]), wire.LAST_CHUNK]
    answer = gateway.ask(stream=True)
    assert comments_of(answer.body)
    assert_same(_without_comments(answer.body), data)


@pytest.mark.cases(61)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("how", ["status", "closed", "broken off", "first event"])
def test_errors_after_a_comment_are_events(
    patient: tuple[Gateway, float], upstream: FakeBackend, path: str, how: str
) -> None:
    gateway, after = patient
    failures: dict[str, list[Step]] = {
        "status": [wire.whole(ERROR, 400)],
        "closed": [Close()],
        "broken off": [wire.SSE_HEAD, Close()],
        "first event": script([b"data: " + ERROR + b"\n\n"]),
    }
    upstream.script = [2.5 * after, *failures[how]]
    answer = gateway.ask(path, stream=True)
    assert answer.status == 200
    assert comments_of(answer.body)
    assert "error" in events(answer.body)[-1][1]
    assert b"[DONE]" not in answer.body
    assert answer.whole


@pytest.mark.cases(61)
def test_no_comments_in_what_is_no_stream(patient: tuple[Gateway, float], upstream: FakeBackend) -> None:
    gateway, after = patient
    upstream.script = [3 * after, wire.whole(BODY)]
    assert_answer(gateway.ask(), 200, BODY)


@pytest.mark.cases(61)
@pytest.mark.parametrize("kind", ["text/html", "application/json"])
def test_no_comments_in_a_page_that_comes_slowly(
    patient: tuple[Gateway, float], upstream: FakeBackend, kind: str
) -> None:
    gateway, after = patient
    half = len(BODY) // 2
    head = wire.head(200, kind, f"content-length: {len(BODY)}")
    upstream.script = [head, BODY[:half], 0.05, BODY[half:-1], 0.05, BODY[-1:]]
    _steady(gateway, BODY)
    if kind == "text/html":
        upstream.script = [head, BODY[:half], 3 * after, BODY[half:]]
        assert_same(gateway.ask(stream=True).body, BODY)


@pytest.mark.cases(61)
def test_no_comments_where_none_are_wanted(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.script = [0.8, *script(STREAM)]
    assert_same(gateway.ask(stream=True).body, b"".join(STREAM))


@pytest.mark.cases(61)
def test_a_client_leaves_between_comments(patient: tuple[Gateway, float], upstream: FakeBackend) -> None:
    gateway, _ = patient
    upstream.script = [PeerCloses()]
    with gateway.call(stream=True) as call:
        call.until(b":")
        call.leave()
    _assert_closed(upstream)


@pytest.mark.cases(62)
@pytest.mark.feature("connect time-out")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_connecting_must_not_take_long(gateways: Gateways, upstream: FakeBackend, stream: bool) -> None:
    gateway = gateways.variant("unreachable")
    started = time.monotonic()
    answer = gateway.ask(stream=stream)
    assert time.monotonic() - started > 0.4
    assert answer.status == 503 if gateway.ours else answer.status >= 500 or answer.status == 408
    assert "error" in answer.json()


@pytest.mark.cases(62)
@pytest.mark.feature("first-token time-out")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", PATHS)
def test_the_first_token_must_come_in_time(gateways: Gateways, upstream: FakeBackend, path: str, stream: bool) -> None:
    gateway = gateways.variant("impatient")
    upstream.script = [PeerCloses()]
    started = time.monotonic()
    answer = gateway.ask(path, stream=stream)
    assert time.monotonic() - started > 0.5
    assert answer.status == 504 if gateway.ours else answer.status in (408, 504)
    assert "error" in answer.json()
    _assert_closed(upstream)


@pytest.mark.cases(62)
@pytest.mark.feature("first-token time-out")
def test_headers_are_no_token(gateways: Gateways, upstream: FakeBackend) -> None:
    upstream.script = [0.2, wire.SSE_HEAD, PeerCloses()]
    gateway = gateways.variant("impatient")
    answer = gateway.ask(stream=True)
    assert answer.status == 504 or not gateway.ours
    assert answer.status in (408, 504) or b'"error"' in answer.body
    _assert_closed(upstream)


@pytest.mark.cases(62)
@pytest.mark.feature("first-token time-out")
def test_comments_are_no_token(gateways: Gateways, upstream: FakeBackend) -> None:
    ping: list[Step] = [0.15, wire.chunk(b": ping\n\n")]
    gateway = gateways.variant("impatient")
    upstream.script = [wire.SSE_HEAD, *ping * 1000]
    answer = gateway.ask(stream=True)
    assert b'"error"' in answer.body


@pytest.mark.cases(62)
@pytest.mark.feature("idle time-out")
def test_silence_between_tokens_is_bounded(gateways: Gateways, upstream: FakeBackend) -> None:
    gateway = gateways.variant("impatient")
    upstream.script = [*begun((ROLE, ONE)), PeerCloses()]
    for _ in range(TRIES):
        started = time.monotonic()
        answer = gateway.ask(stream=True)
        assert time.monotonic() - started > 0.5
        # The machine may stand still before there is a token.
        if b"One" in answer.body:
            break
    assert_begins(answer.body, ROLE + ONE)
    assert b'"error"' in answer.body
    assert b"[DONE]" not in answer.body
    _assert_closed(upstream)


@pytest.mark.cases(62)
@pytest.mark.feature("total time-out")
def test_the_whole_is_bounded(gateways: Gateways, upstream: FakeBackend) -> None:
    slowly: list[Step] = [0.1, wire.chunk(ONE)]
    gateway = gateways.variant("impatient")
    upstream.script = [*begun([ROLE]), *slowly * 1200]
    for _ in range(TRIES):
        started = time.monotonic()
        answer = gateway.ask(stream=True)
        assert b'"error"' in answer.body
        # A machine that stands still makes silences of its own, which are bounded, too.
        if (lasted := time.monotonic() - started) > 3.8:
            break
    assert lasted > 3.8
    _assert_closed(upstream)


@pytest.mark.cases(62)
def test_slow_but_steady_is_fine(gateways: Gateways, upstream: FakeBackend) -> None:
    upstream.script = script(STREAM, pause=0.2)
    gateway = gateways.variant("impatient")
    _steady(gateway, b"".join(STREAM))


@pytest.mark.cases(62)
def test_hung_requests_hold_up_nobody(gateway: Gateway, upstream: FakeBackend) -> None:
    upstream.script = lambda request: [PeerCloses()] if b"hang" in request.body else [wire.whole(BODY)]
    hung = [gateway.call(user="hang") for _ in range(50)]
    wait_until(lambda: upstream.busy == len(hung))
    for _ in range(5):
        assert_same(gateway.ask().body, BODY)
    assert upstream.busy == len(hung), "they hang still"
    for call in hung:
        call.leave()


async def _stream(gateway: Gateway, want: Sequence[bytes], began: Callable[[float], None]) -> bool:
    """Whether everything came; `began` is called when the first bytes have, with the seconds that it took."""
    asked = time.monotonic()
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        body = gateway.body(stream=True)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}:{port}\r\nauthorization: Bearer {gateway.key}\r\n"
        head += f"content-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        got = await reader.readuntil(b"\r\n\r\n")
        first = await reader.read(65536)
        began(time.monotonic() - asked)
        got += first + await reader.read()
        said = b'"stop"' in got and b"One" in got and got.rstrip().endswith(b"0") and b"[DONE]" in got
        return b" 200 " in got[:20] and (said if notes.lenient else all(part in got for part in want))
    finally:
        writer.close()


@pytest.mark.cases(63)
def test_a_thousand_streams(gateway: Gateway, upstream: FakeBackend) -> None:
    """All of them have begun before the first one goes on, and 99 in a hundred of them in time."""
    go = threading.Event()
    waits: list[float] = []
    upstream.script = [*begun([ROLE]), Until(go), *map(wire.chunk, (ONE, FINISH, DONE)), wire.LAST_CHUNK]

    def began(after: float) -> None:
        waits.append(after)
        if len(waits) == MANY:
            go.set()

    async def run() -> list[bool | BaseException]:
        calls = [asyncio.create_task(_stream(gateway, (ROLE, ONE, FINISH, DONE), began)) for _ in range(MANY)]
        return await asyncio.gather(*calls, return_exceptions=True)

    late = threading.Timer(PATIENCE, go.set)
    late.start()
    with ThreadPoolExecutor(1) as pool, Lateness(gateway.pid) as lost:
        results = pool.submit(lambda: asyncio.run(run())).result()
    together = late.is_alive()
    late.cancel()
    assert [result for result in results if result is not True] == []
    assert together or not gateway.ours
    assert len(upstream.requests) == MANY
    assert statistics.quantiles(waits, n=100)[-1] - lost.longest < BEGUN or not timing.asserted


@pytest.mark.cases(64)
@pytest.mark.feature("drain")
def test_an_orderly_end(gateways: Gateways, upstream: FakeBackend) -> None:
    gateway = gateways.ending()
    assert gateway.pid is not None
    assert gateway.is_ready()
    go = threading.Event()
    upstream.script = [*begun(STREAM[:2]), Until(go), *map(wire.chunk, STREAM[2:]), wire.LAST_CHUNK]
    calls = [gateway.call(stream=True) for _ in range(5)]
    try:
        for call in calls:
            call.until(b"One")
        os.kill(gateway.pid, signal.SIGTERM)
        wait_until(lambda: not gateway.is_ready())
        with contextlib.suppress(ConnectionRefusedError):
            refused = gateway.ask()
            assert refused.status == 503
            assert "error" in refused.json()
        assert not gateway.has_ended(0)
        go.set()
        for call in calls:
            assert_same(call.answer().body, b"".join(STREAM))
        assert gateway.has_ended(PATIENCE)
    finally:
        go.set()


@pytest.mark.cases(65)
def test_a_slow_reader_slows_the_upstream_down(gateway: Gateway, upstream: FakeBackend) -> None:
    before = gateway.resident() if gateway.pid else 0
    upstream.script = [*begun([ROLE]), *[wire.chunk(LARGE)] * 1500, *map(wire.chunk, (FINISH, DONE)), wire.LAST_CHUNK]
    with gateway.call(stream=True) as call:
        call.until(b"assistant")
        sent = -1
        while sent != len(upstream.last.sent):
            sent = len(upstream.last.sent)
            time.sleep(0.3)
        assert sent < 700
        if gateway.pid:
            assert gateway.resident() - before < 64 * 1024**2
        answer = call.answer()
    assert answer.whole
    assert_same(answer.body, b"".join((ROLE, *[LARGE] * 1500, FINISH, DONE)))
