"""Client keys that are kept in Redis, as this proxy last heard of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from policies.errors import StoreUnavailable
from policies.settings import StoredKey
from proxy.store import Store
from proxy.tasks import end
from verifier_pool.link import keys

logger = logging.getLogger(__name__)

EVERY = 1.0
"""Seconds between two looks: for so long, and as long as one takes, a revoked key goes on working. While Redis is away
what was heard last holds."""


class Registry:
    """Every key in Redis, so that no request waits for one that is known.

    A look asks for the version alone, and for the keys where that has changed. Who does not find a key asks at once
    (`look`), so that a new one works from the start; all who ask meanwhile share the next look.

    Attributes:
        known: keys that nobody revoked, by their SHA-256; they may have expired.
        heard: whether Redis ever told us.
        any: whether there ever was a key, revoked ones among them. Once true it stays so: a Redis that lost its data
            opens nothing.
    """

    def __init__(self, store: Store) -> None:
        self.known: Mapping[str, StoredKey] = {}
        self.heard = False
        self.any = False
        self._store = store
        self._version: bytes | None = None
        self._turn = asyncio.Lock()
        self._begun = 0
        self._failure: StoreUnavailable | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look once, so that the first request finds the keys known, and then each second."""
        with contextlib.suppress(StoreUnavailable):
            await self.look()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            await end(self._task)

    async def look(self) -> None:
        """See what Redis says after this call began. Raises StoreUnavailable; what was known then stays."""
        before = self._begun
        async with self._turn:
            if self._begun == before:
                self._begun += 1
                self._failure = None
                try:
                    await self._ask()
                except StoreUnavailable as error:
                    self._failure = error
            if self._failure is not None:
                raise StoreUnavailable("the keys cannot be read") from self._failure

    async def _ask(self) -> None:
        version, stored = await self._store.keys(self._version)
        self._version = version
        if stored is not None:
            found, unreadable = keys.read(stored)
            if unreadable:
                logger.error("keys in redis cannot be read; they let nobody in", extra={"count": unreadable})
            self.known = {key.sha256: key for key in found if key.revoked is None}
            self.any = self.any or bool(stored)
        self.heard = True

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            with contextlib.suppress(StoreUnavailable):
                await self.look()
