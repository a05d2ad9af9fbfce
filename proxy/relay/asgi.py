"""The few things said to an ASGI server: read a body, answer, notice that the client left."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from starlette.types import Message, Receive, Send

from policies.errors import ApiError, RequestTimeout, RequestTooLarge, UnsupportedMedia
from proxy.begun import Begun
from proxy.tap.rawjson import write
from proxy.tap.words import said
from proxy.tasks import AGAIN

LINGER_SECONDS = 2.0
"""How long what a refused client still sends is thrown away."""
_DIGITS = 18


class ClientLeft(Exception):
    """The client went away while its request was read."""


def _weightless(_: int) -> None:
    """For bodies that are bounded enough."""


async def read_body(
    receive: Receive,
    headers: Mapping[bytes, bytes],
    limit: int,
    seconds: float | None = None,
    weigh: Callable[[int], None] = _weightless,
) -> bytes:
    """The request's body; while it comes, `weigh` is told how much of it is here. Raises RequestTooLarge as soon as
    that is known, RequestTimeout when it is not there after so many seconds, UnsupportedMedia for a compressed one,
    ClientLeft, and what `weigh` does."""
    if headers.get(b"content-encoding", b"").strip().lower() not in (b"", b"identity"):
        raise UnsupportedMedia("compressed request bodies are not read here; send it as it is")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and (len(length) > _DIGITS or int(length) > limit):
        raise RequestTooLarge(f"the request body is over the limit of {limit} bytes")
    body = bytearray()
    try:
        # Mostly all of it is there already, and no time-out has to be set.
        first = Begun(receive())
        if first.done and _take(first.result, body, limit, weigh):
            return bytes(body)
        async with asyncio.timeout(seconds):
            more = first.done or not _take(await first, body, limit, weigh)
            while more:
                more = not _take(await receive(), body, limit, weigh)
        return bytes(body)
    except TimeoutError as error:
        raise RequestTimeout(f"the request body took over {seconds:g} seconds") from error
    finally:
        # An error holds on to it as long as it is answered.
        body.clear()


def _take(message: Message, body: bytearray, limit: int, weigh: Callable[[int], None]) -> bool:
    """Add a part to the body; whether it is whole."""
    if message["type"] == "http.disconnect":
        raise ClientLeft
    body += message.get("body", b"")
    if len(body) > limit:
        raise RequestTooLarge(f"the request body is over the limit of {limit} bytes")
    weigh(len(body))
    return not message.get("more_body", False)


async def answer_json(
    send: Send, status: int, body: Any, headers: Sequence[tuple[bytes, bytes]] = (), *, more: bool = False
) -> None:
    """A whole JSON answer; with `more` the connection stays open until `end`."""
    data = write(body)
    start = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def answer_error(
    send: Send, error: ApiError, headers: Sequence[tuple[bytes, bytes]] = (), *, path: str = ""
) -> None:
    """An error as clients of the path read it; one that passes by itself says when to come again."""
    await answer_json(send, error.status, said(path, error), [*headers, *_again(error)])


async def refuse_body(
    receive: Receive, send: Send, error: ApiError, headers: Sequence[tuple[bytes, bytes]] = (), *, path: str = ""
) -> None:
    """Answer before the body was read. Closing at once would reset the connection and lose the answer, so what
    the client is still sending is thrown away for a moment."""
    closing = [*headers, *_again(error), (b"connection", b"close")]
    await answer_json(send, error.status, said(path, error), closing, more=True)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b""})


def _again(error: ApiError) -> list[tuple[bytes, bytes]]:
    return [(b"retry-after", str(math.ceil(error.retry_after or 1)).encode())] if error.status == 503 else []


async def unless_client_leaves(
    receive: Receive, work: Coroutine[Any, Any, None], delivered: Callable[[], bool]
) -> None:
    """Run `work`; cancel it when the client leaves before everything was `delivered`.

    One watcher covers every phase: waiting for the backend's headers, streaming, a blocked write, an inline
    wait. `work` cleans up without awaiting, so the backend's connection is closed at once.
    """
    task = asyncio.current_task()
    assert task is not None
    cancelled = 0

    async def watch() -> None:
        nonlocal cancelled
        while (await receive())["type"] != "http.disconnect":
            pass
        if delivered():
            return
        # More than once, as `tasks.end` does.
        while True:
            cancelled += 1
            task.cancel()
            await asyncio.sleep(AGAIN)

    watching: asyncio.Task[None] | None = None
    try:
        begun = Begun(work)
        if not begun.done:
            watching = asyncio.create_task(watch())
            await begun
    except asyncio.CancelledError:
        for _ in range(cancelled):
            task.uncancel()
        # Somebody else may have cancelled us, too.
        if not cancelled or task.cancelling():
            raise
    finally:
        if watching is not None:
            watching.cancel()
