"""News of verdicts: who waits for one looks when there is some."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from policies.errors import StoreUnavailable
from proxy.asking import PATIENCE
from proxy.outage import Outage
from proxy.patience import Patience
from verifier_pool.link.queue import VERDICTS

_POLL = 1.0


class News:
    """One subscription per process hears of every verdict; waiting also polls, so that a lost message costs a second
    and no more."""

    def __init__(self, redis: Redis, outage: Outage, draining: Callable[[], bool]) -> None:
        self._redis = redis
        self._outage = outage
        self._draining = draining
        self._waiting: dict[str, set[asyncio.Event]] = {}

    async def wait(
        self,
        id: str,
        seconds: float,
        look: Callable[[], Awaitable[dict[str, Any] | None]],
        *,
        patient: bool = False,
    ) -> dict[str, Any] | None:
        """What `look` finds as soon as it finds something, None when the time is over; looks whenever there is news of
        the verdict. Whoever is `patient` waits through outages, and not through a drain, in which he can ask others.
        """
        deadline = time.monotonic() + seconds
        woken = asyncio.Event()
        waiting = self._waiting.setdefault(id, set())
        waiting.add(woken)
        try:
            while True:
                woken.clear()
                pause = _POLL
                try:
                    if (found := await look()) is not None:
                        return found
                except StoreUnavailable:
                    if not patient or self._draining() or time.monotonic() >= deadline:
                        raise
                    pause = _POLL / 4
                left = deadline - time.monotonic()
                if pause == _POLL and (left <= 0 or (patient and self._draining())):
                    return None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, min(left, pause))):
                        await woken.wait()
        finally:
            waiting.discard(woken)
            if not waiting:
                self._waiting.pop(id, None)

    async def listen(self) -> None:
        """Wake whoever waits for a verdict, for ever; after an outage subscribe again."""
        while True:
            with contextlib.suppress(RedisError, OSError, TimeoutError, StoreUnavailable):
                if not self._outage.down:
                    async with self._redis.pubsub(ignore_subscribe_messages=True) as channel:
                        async with Patience(PATIENCE):
                            await channel.subscribe(VERDICTS)
                        await self._hear(channel)
            await asyncio.sleep(_POLL / 2)

    async def _hear(self, channel: PubSub) -> None:
        while not self._outage.down:
            message = await channel.get_message(timeout=_POLL)
            if message is None:
                continue
            id = message["data"].decode(errors="replace")
            for woken in self._waiting.get(id, ()):
                woken.set()
