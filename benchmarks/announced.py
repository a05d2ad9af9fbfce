"""When verdicts were announced, on the event loop's clock."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

from redis.asyncio import Redis

from policies.errors import StoreUnavailable
from verifier_pool.link.queue import VERDICTS


class Announced:
    """Listens as a client that waits for verdicts would; an asynchronous context manager.

    Raises:
        StoreUnavailable: from `taken` and `news`, when Redis can no longer be heard.
    """

    def __init__(self, redis_url: str) -> None:
        self._redis = Redis.from_url(redis_url, socket_timeout=None)
        self._listener: asyncio.Task[None] | None = None
        self._at: dict[str, float] = {}
        self._heard = asyncio.Event()

    async def __aenter__(self) -> Announced:
        self._channel = self._redis.pubsub(ignore_subscribe_messages=True)
        await self._channel.subscribe(VERDICTS)
        self._listener = asyncio.create_task(self._listen())
        self._listener.add_done_callback(lambda _: self._heard.set())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._listener is not None
        self._listener.cancel()
        await asyncio.wait([self._listener])
        await self._channel.aclose()  # type: ignore[no-untyped-call]
        await self._redis.aclose()

    def taken(self) -> dict[str, float]:
        """By id, when its verdict was announced, of all since the last call."""
        self._check()
        self._heard.clear()
        found, self._at = self._at, {}
        return found

    async def news(self, patience: float) -> bool:
        """Wait until something is there to be taken; whether it came within so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._heard.wait()
        self._check()
        return self._heard.is_set()

    def _check(self) -> None:
        assert self._listener is not None
        if self._listener.done():
            raise StoreUnavailable("verdicts can no longer be heard") from self._listener.exception()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            message = await self._channel.get_message(timeout=1.0)
            if message is not None:
                self._at[message["data"].decode()] = loop.time()
                self._heard.set()
