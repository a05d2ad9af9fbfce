"""Receipts and their log for clients, read in threads so that no stream waits; and heads of the log, in time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import orjson
from redis.exceptions import RedisError

from policies import jws
from policies.errors import ReceiptError, SealError, StoreFailed, StoreUnavailable
from policies.settings import Settings
from proxy.tasks import end
from verifier_pool.link import connection
from verifier_pool.link.log import DURABLE_SECONDS, Log
from verifier_pool.link.signing import signer_of

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

_PATIENCE = 2.0
"""Seconds that Redis has for a connection, and for an answer besides what durability takes."""
_AT_ONCE, _LARGE_AT_ONCE = 4, 2


class Receipts:
    """One per process.

    Attributes:
        unpublished: keys that receipts in Redis are signed with, and that nobody who asks here is told.

    Raises:
        SettingsError: a key of the settings is none.
    """

    def __init__(self, url: str, settings: Settings) -> None:
        patience = _PATIENCE + max(DURABLE_SECONDS, settings.durability.timeout)
        self._redis = connection.connect(url, timeout=patience, connect_timeout=_PATIENCE, retries=1)
        self._signer = signer_of(self._redis, settings)
        self._log = Log(self._redis, self._signer, settings.durability)
        self._settings, self._kept = settings.receipts, settings.verification.verdict_ttl
        self.unpublished = 0
        self._turn, self._large = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_LARGE_AT_ONCE)
        self._tasks: list[asyncio.Task[None]] = []

    def renew(self, settings: Settings) -> None:
        """Take over other settings."""
        self._settings, self._kept = settings.receipts, settings.verification.verdict_ttl
        self._signer.renew(settings.receipts)

    async def start(self) -> None:
        """Begin to sign heads of the log while it grows."""
        self._tasks = [asyncio.create_task(self._keep())]

    async def close(self) -> None:
        """Stop, and close the connections."""
        await end(*self._tasks)
        await asyncio.to_thread(self._redis.close)

    async def ask(self, work: Callable[[Log], _T], *, large: bool = False) -> _T:
        """What comes of this, in a thread.

        Args:
            large: it may take long, and keeps nobody waiting but others like it.

        Raises:
            StoreUnavailable: Redis does not answer.
            StoreFailed: there is no key to sign with, or the log is damaged.
        """
        async with self._large if large else self._turn:
            try:
                return await asyncio.to_thread(work, self._log)
            except (RedisError, OSError) as error:
                raise StoreUnavailable(type(error).__name__) from error
            except (ReceiptError, SealError) as error:
                logger.error("receipts fail", extra={"error": str(error)})
                raise StoreFailed("receipts cannot be signed right now; try again later") from error

    async def published(self) -> bytes:
        """The JWK set of the keys that receipts are signed with. Raises what `ask` does."""
        return orjson.dumps(jws.jwk_set(await self.ask(lambda log: log.signer.published())))

    async def _keep(self) -> None:
        with contextlib.suppress(StoreUnavailable, StoreFailed):
            # A key that has to be made is there before a Redis that fills up could keep it from being.
            await self.published()
            if not await self.ask(lambda log: log.outlives()):
                logger.warning(
                    "Redis keeps no append-only file that can be waited for (appendonly yes, WAITAOF: Redis 7.2 or "
                    "Valkey): when it restarts, another log of receipts begins"
                )
        while True:
            seconds = self._settings.head_seconds
            await asyncio.sleep(seconds)
            try:
                await self.ask(lambda log: log.keep(seconds))  # noqa: B023
                self._tell(await self.ask(lambda log: log.signer.unpublished(time.time() - self._kept)))
            except (StoreUnavailable, StoreFailed) as error:
                logger.warning("no head of the log was signed", extra={"error": type(error).__name__})

    def _tell(self, unpublished: Sequence[str]) -> None:
        if len(unpublished) > self.unpublished:
            said = (
                "receipts are signed with keys that are not published: are receipts.signing_keys the same everywhere?"
            )
            logger.error(said, extra={"kids": " ".join(unpublished)})
        self.unpublished = len(unpublished)
