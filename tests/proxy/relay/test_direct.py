"""Requests as they go to aiohttp's connections: the same bytes as by aiohttp's client."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from yarl import URL

from policies.settings import TimeoutSettings
from proxy.relay.direct import Target
from proxy.relay.transport import AiohttpTransport, UpstreamRequest

_HEADERS = [("content-type", "application/json"), ("accept", "text/event-stream"), ("x-request-id", "é")]
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def _sent(path: str, *, ours: bool) -> bytes:
    """What a backend gets of a request."""
    got: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await reader.readuntil(b"{}"))
        writer.write(_ANSWER)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}{path}"
        if ours:
            transport = AiohttpTransport(TimeoutSettings())
            answer = await transport.send(UpstreamRequest(url, _HEADERS, b"{}"))
            assert (answer.status, await answer.read()) == (200, b"ok")
            answer.close()
            await transport.close()
        else:
            headers = [*_HEADERS, ("accept-encoding", "identity"), ("user-agent", "x")]
            at = URL(url, encoded=True)
            async with aiohttp.ClientSession() as session, session.post(at, data=b"{}", headers=headers) as theirs:
                assert await theirs.read() == b"ok"
    return got[0].replace(str(port).encode(), b"PORT")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/a%20b/v1?x=%2F&y"])
def test_bytes_are_those_of_aiohttp(path: str) -> None:
    ours, theirs = asyncio.run(_sent(path, ours=True)), asyncio.run(_sent(path, ours=False))
    assert ours == theirs.replace(b"accept-encoding: identity\r\nuser-agent: x\r\n", b"")


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "a\0"])
def test_a_header_is_one(value: str) -> None:
    async def written() -> bytes:
        async with aiohttp.ClientSession() as session:
            return Target(URL("http://b/v1"), session).written([("x", value)], b"")

    with pytest.raises(ValueError, match="characters"):
        asyncio.run(written())


def test_a_password_in_an_address_is_left_to_aiohttp() -> None:
    async def simple(url: str) -> bool:
        async with aiohttp.ClientSession() as session:
            return Target(URL(url), session).simple

    assert asyncio.run(simple("http://b/v1"))
    assert not asyncio.run(simple("http://me:secret@b/v1"))
