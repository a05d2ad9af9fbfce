"""A backend that does whatever a request's prompt tells it to, on raw sockets, in a process of its own.

`python -m benchmarks.leaks.upstream` prints its port and serves until it is told to stop.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Callable

import orjson

from benchmarks.overhead.answer import Ask, Script
from benchmarks.overhead.upstream import HEAD, LAST, chunk

TOKENS = 12
LARGE_TOKENS = 1000
PAUSE = 0.004
_ACT = re.compile(rb"\[act ([a-z-]+)\]")
_JSON = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_ERROR = orjson.dumps({"error": {"message": "scripted", "type": "scripted", "param": None, "code": None}})


class Reset(Exception):
    """Close the connection with an RST."""


class Hang(Exception):
    """Say no more, but stay."""


class Dead(Exception):
    """Close the connection."""


Parts = AsyncIterator[bytes]
Act = Callable[[Script, Ask], Parts]


def act(name: str) -> str:
    """What a prompt says so that the backend does that."""
    return f"[act {name}]"


async def _serve_well(script: Script, ask: Ask) -> Parts:
    yield HEAD + chunk(script.role(ask))
    for index in range(ask.tokens):
        yield chunk(script.token(ask, index))
        await asyncio.sleep(PAUSE)
    yield chunk(script.end(ask)) + LAST


async def _slowly(script: Script, ask: Ask) -> Parts:
    await asyncio.sleep(0.2)
    async for part in _serve_well(script, ask):
        yield part
        await asyncio.sleep(0.05)


async def _large(script: Script, ask: Ask) -> Parts:
    """Much more than the sockets in between hold, as fast as it goes."""
    yield HEAD + chunk(script.role(ask))
    for index in range(ask.tokens):
        yield chunk(script.token(ask, index))
    yield chunk(script.end(ask)) + LAST


async def _whole(script: Script, ask: Ask) -> Parts:
    body = script.whole(ask)
    yield _JSON % (200, len(body), body)


async def _dies_at_once(script: Script, ask: Ask) -> Parts:
    if ask.tokens < 0:
        yield b""
    raise Dead


async def _dies_midway(script: Script, ask: Ask) -> Parts:
    yield HEAD + chunk(script.role(ask)) + chunk(script.token(ask, 0))
    raise Dead


async def _resets(script: Script, ask: Ask) -> Parts:
    yield HEAD + chunk(script.role(ask)) + chunk(script.token(ask, 0))
    raise Reset


async def _hangs_at_once(script: Script, ask: Ask) -> Parts:
    if ask.tokens < 0:
        yield b""
    raise Hang


async def _hangs_midway(script: Script, ask: Ask) -> Parts:
    yield HEAD + chunk(script.role(ask)) + chunk(script.token(ask, 0))
    raise Hang


async def _forgets_the_end(script: Script, ask: Ask) -> Parts:
    yield HEAD + chunk(script.role(ask)) + chunk(script.token(ask, 0)) + LAST


async def _no_http(script: Script, ask: Ask) -> Parts:
    yield b"\x16\x03\x01 what is this?\r\n\r\n"
    raise Dead


async def _no_json(script: Script, ask: Ask) -> Parts:
    yield HEAD + chunk(b'data: {"choices": [{]}\n\n') + chunk(b"data: [DONE]\n\n") + LAST


async def _endless_line(script: Script, ask: Ask) -> Parts:
    yield HEAD
    for _ in range(4096):
        yield chunk(b"x" * 65536)


def _status(status: int) -> Act:
    async def answer(script: Script, ask: Ask) -> Parts:
        yield _JSON % (status, len(_ERROR), _ERROR)

    return answer


ACTS: dict[str, Act] = {
    "serve-well": _serve_well,
    "slowly": _slowly,
    "large": _large,
    "whole": _whole,
    "dies-at-once": _dies_at_once,
    "dies-midway": _dies_midway,
    "resets": _resets,
    "hangs-at-once": _hangs_at_once,
    "hangs-midway": _hangs_midway,
    "forgets-the-end": _forgets_the_end,
    "no-http": _no_http,
    "no-json": _no_json,
    "endless-line": _endless_line,
    "refuses": _status(400),
    "is-busy": _status(429),
    "fails": _status(500),
}


async def _answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while (body := await _request(reader)) is not None:
            found = _ACT.search(body)
            wanted = ACTS.get(found[1].decode() if found else "", _whole)
            ask = Ask.read(body, script.tokens) if body else Ask(1, False, False)
            async for part in wanted(script, ask):
                writer.write(part)
                await writer.drain()
    except Hang:
        await reader.read()
    except Reset:
        writer.transport.abort()
    except (Dead, OSError, ValueError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def _request(reader: asyncio.StreamReader) -> bytes | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    length = re.search(rb"(?i)content-length: *([0-9]+)", head)
    return await reader.readexactly(int(length[1]) if length else 0)


async def _run() -> None:
    script, stop = Script(LARGE_TOKENS), asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _answer(script, reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await stop.wait()
    server.close()


if __name__ == "__main__":
    asyncio.run(_run())
