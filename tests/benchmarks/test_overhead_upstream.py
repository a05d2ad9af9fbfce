"""The scripted backend and the measuring client, over real sockets, and what the proxy's tap makes of the script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import numpy as np
import orjson
import pytest

from benchmarks.overhead.answer import PROMPT_IDS, TOP, Ask, Script
from benchmarks.overhead.client import Target, Timed, burst
from benchmarks.overhead.upstream import Plan, precise_loop, serve
from policies.settings import parse_settings
from proxy.relay.body import Body
from proxy.tap import open_tap
from proxy.tap.prepare import prepare

TOKENS = 8
SETTINGS = """
models: {scripted: {}}
backends: [{name: bench, url: "http://127.0.0.1:1", model: scripted}]
"""


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        runner.run(test())


@asynccontextmanager
async def scripted(first: float = 0.0, interval: float = 0.0) -> AsyncIterator[str]:
    server = await serve(Plan(Script(TOKENS), first, interval))
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.sleep(0.01)


def target(url: str, **request: object) -> Target:
    return Target("direct", f"{url}/v1/chat/completions", orjson.dumps({"stream": True, **request}), {})


def test_tokens_come_in_order_and_never_early() -> None:
    async def test() -> None:
        async with scripted(first=0.02, interval=0.005) as url:
            (timed,) = await burst(target(url, max_tokens=TOKENS), [0.0], 10)
            assert timed.response is not None
            assert timed.response.text == Script(TOKENS).text(TOKENS)
            since = timed.response.token_times - timed.due
            assert len(since) == TOKENS
            assert np.all(since >= 0.02 + 0.005 * np.arange(TOKENS) - 1e-4)
            assert np.all(np.diff(since) >= 0)

    run(test)


def test_streams_overlap_and_are_due_at_their_own_time() -> None:
    async def test() -> None:
        async with scripted(first=0.05) as url:
            offsets = np.linspace(0, 0.02, 16)
            answers = await burst(target(url), offsets, 10)
            assert [timed.error for timed in answers] == [""] * 16
            assert np.allclose(np.diff([timed.due for timed in answers]), np.diff(offsets))
            ends = [timed.response.finished for timed in answers if timed.response]
            assert max(ends) - answers[0].due < 16 * 0.05

    run(test)


def test_requests_in_many_pieces_are_understood() -> None:
    async def test() -> None:
        async with scripted() as url:
            one = target(url, max_tokens=2)
            reader, writer = await asyncio.open_connection(*one.address())
            for byte in one.request() * 2:
                writer.write(bytes([byte]))
                await asyncio.sleep(0)
            for _ in range(2):
                assert b" word1" in await reader.readuntil(b"\r\n0\r\n\r\n")
            writer.write(b"GET /v1/models HTTP/1.1\r\n\r\n")
            assert b"content-length" in await reader.readuntil(b"\r\n\r\n")
            writer.close()
            await writer.wait_closed()

    run(test)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nda"])
def test_a_backend_that_hangs_up_is_an_error(answer: bytes) -> None:
    async def test() -> None:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        (timed,) = await burst(target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), [0.0], 5)
        assert timed.response is None
        assert timed.error
        server.close()
        await server.wait_closed()

    run(test)


def test_a_silent_backend_is_an_error() -> None:
    async def test() -> None:
        async with scripted(first=0.5) as url:
            (timed,) = await burst(target(url), [0.0], 0.05)
            assert timed == Timed(timed.due, None, "timeout")

    run(test)


@pytest.mark.parametrize(
    ("request_body", "ask"),
    [
        ({"max_tokens": 3}, Ask(3, False, False)),
        ({"max_completion_tokens": 5, "max_tokens": 3, "logprobs": True}, Ask(5, True, False)),
        ({"max_tokens": 999, "stream_options": {"include_usage": True}}, Ask(TOKENS, False, True)),
        ({"stream_options": None, "logprobs": False}, Ask(TOKENS, False, False)),
    ],
)
def test_asks(request_body: dict[str, object], ask: Ask) -> None:
    assert Ask.read(orjson.dumps(request_body), TOKENS) == ask


def test_asks_are_objects() -> None:
    with pytest.raises(ValueError, match="object"):
        Ask.read(b"[]", TOKENS)


def test_the_script_is_clean_evidence_and_the_plain_stream_comes_out() -> None:
    script = Script(TOKENS)
    plain = Ask(TOKENS, evidence=False, usage=False)
    settings = parse_settings(SETTINGS, {})
    body = orjson.dumps({"model": "scripted", "messages": [], "max_tokens": TOKENS, "temperature": 0, "stream": True})
    prepared = prepare(Body.read("chat", body), settings.models["scripted"], settings.backends[0], seed=5)
    ask = Ask.read(prepared.body, TOKENS)
    assert ask == Ask(TOKENS, evidence=True, usage=True)
    tap = open_tap(prepared, "scripted", content_type="text/event-stream; charset=utf-8")
    frames = [script.role(ask), *(script.token(ask, index) for index in range(TOKENS)), script.end(ask)]
    sent = b"".join(map(tap.feed, frames)) + tap.close() + tap.done
    (evidence,) = tap.evidence(id="0" * 32, backend="bench", model="scripted")
    assert evidence.faults == ()
    assert evidence.complete
    assert evidence.prompt_ids.tolist() == list(PROMPT_IDS)
    assert evidence.output_ids.shape == (TOKENS,)
    assert evidence.claim_ids.shape[0] == TOKENS
    assert np.isfinite(evidence.claim_logprobs[:, :TOP]).all()
    assert np.exp(evidence.claim_logprobs[:, :TOP]).sum(axis=1).max() <= 1 + 1e-6
    assert evidence.usage is not None
    assert evidence.usage.completion_tokens == evidence.usage.counted_completion_tokens == TOKENS
    events = [script.role(plain), *(script.token(plain, index) for index in range(TOKENS)), script.end(plain)]
    assert sent == b"".join(events)
