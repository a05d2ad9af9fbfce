"""When verdicts were announced, on the event loop's clock."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

from redis.asyncio import Redis

from verifier_pool.link.queue import VERDICTS


class Announced:
    """Listens as a client that waits for verdicts would; an asynchronous context manager."""

    def __init__(self, redis_url: str) -> None:
        self._redis = Redis.from_url(redis_url, socket_timeout=None)
        self._listener: asyncio.Task[None] | None = None
        self._at: dict[str, float] = {}

    async def __aenter__(self) -> Announced:
        self._channel = self._redis.pubsub(ignore_subscribe_messages=True)
        await self._channel.subscribe(VERDICTS)
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._listener is not None
        self._listener.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._listener
        await self._channel.aclose()  # type: ignore[no-untyped-call]
        await self._redis.aclose()

    def taken(self) -> dict[str, float]:
        """By id, when its verdict was announced, of all since the last call."""
        found, self._at = self._at, {}
        return found

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            message = await self._channel.get_message(timeout=1.0)
            if message is not None:
                self._at[message["data"].decode()] = loop.time()
