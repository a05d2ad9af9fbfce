"""How the event loop asks Redis, and what it makes of what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from policies.errors import NoConnection, StoreUnavailable
from proxy.outage import Outage
from proxy.patience import Patience
from verifier_pool.link import connection, durable

PATIENCE = 2.0
"""Seconds the event loop waits for Redis before it is called down. A Redis that is gone refuses at once, so only
one that hangs costs this, and only to the requests of its first two seconds; less mistook a busy machine, whose event
loop itself comes late, for an outage."""

_AT_ONCE = 16
"""Connections for what is asked in passing; more wait until one is free, however long Redis takes to answer."""


class _Anything:
    """What has to be written: what Redis refuses is an outage, too, unless it is full."""

    def __init__(self, outage: Outage) -> None:
        self._outage = outage

    def __enter__(self) -> None:
        if self._outage.down:
            raise StoreUnavailable("redis does not answer")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, OutOfMemoryError):
            # It answers everything else, and has room again once evidence expires.
            raise StoreUnavailable("redis is full") from error
        if isinstance(error, RedisError | OSError | TimeoutError | durable.NotDurable):
            if connection.our_own(error):
                raise NoConnection("there is no connection left for redis") from error
            self._outage.failed(error)
            raise StoreUnavailable("redis does not answer") from error


class _Aside(_Anything):
    """What Redis refuses here, such as a key of another kind, is no outage: verdicts go on."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, ResponseError):
            raise StoreUnavailable("redis refuses") from error
        super().__exit__(kind, error, at)


class Asking:
    """Scopes in which Redis is asked; they raise StoreUnavailable, at once while an outage lasts.

    A Redis that is silent or away begins one. How many ask at once does not: they wait for their turn; nor does a
    machine that has no connection left (NoConnection).

    Attributes:
        anything: for what has to be written.
        aside: where a refusal is no outage.
    """

    def __init__(self, outage: Outage) -> None:
        self.anything = _Anything(outage)
        self.aside = _Aside(outage)
        self.places = asyncio.Semaphore(_AT_ONCE)

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """As `aside`, on a connection of one's own: for the few who ask on their own account."""
        with self.aside:
            async with Patience(PATIENCE):
                yield

    @contextlib.asynccontextmanager
    async def in_turn(self) -> AsyncIterator[None]:
        """As `alone`, for those who ask for a client, however many they are."""
        async with self.places, self.alone():
            yield


def value_of(said: Any) -> Any:
    """An answer of `Lanes.ask`; raises the error that it is."""
    if isinstance(said, Exception):
        raise said
    return said
