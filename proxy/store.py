"""Redis from the event loop: intents before a request, verdicts after it, standings. Nothing waits for a dead Redis."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import orjson
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError

from policies.errors import NotFound, StoreUnavailable
from policies.settings import DurabilitySettings, VerificationSettings
from policies.verification import pending
from proxy.asking import PATIENCE, Asking, value_of
from proxy.generation import Generation
from proxy.lanes import Lanes
from proxy.metrics import Metrics
from proxy.news import News
from proxy.outage import Outage
from proxy.tasks import end
from verifier_pool.link import connection, durable
from verifier_pool.link.keys import KEYS
from verifier_pool.link.keys import VERSION as KEYS_VERSION
from verifier_pool.link.queue import (
    OPEN,
    STANDINGS,
    intent_key,
    standing_key,
    units_key,
    verdict_key,
)
from verifier_pool.link.scripts import open_intent

_CONNECT = 5 * PATIENCE
"""Seconds for a connection, which redis-py counts whether or not the event loop comes round; `PATIENCE` ends before."""

Call = tuple[AsyncScript, Sequence[str], Sequence[str | int]]
"""A script with its KEYS and ARGV."""

logger = logging.getLogger(__name__)

_READS = 8
"""Reads in one turn: few, so that a flood of them comes back in a trickle and lets others have the event loop."""


class Store:
    """Intents, verdicts and standings.

    While an outage lasts every call raises StoreUnavailable at once. However many ask at once, that
    makes none: they wait, and intents, limits, what clients read and everything else each only for their own kind.
    """

    def __init__(
        self,
        url: str,
        settings: VerificationSettings,
        outage: Outage,
        metrics: Metrics,
        draining: Callable[[], bool] = lambda: False,
        *,
        durability: DurabilitySettings | None = None,
    ) -> None:
        self._durability = durability or DurabilitySettings()
        self._until_durable = durable.command(self._durability)
        self._redis = connection.connect_async(url, connect_timeout=_CONNECT)
        self._asking = Asking(outage)
        self._intents = Lanes(
            connection.connect_async(url, connect_timeout=_CONNECT),
            PATIENCE + durable.seconds(self._durability),
            self._until_durable,
        )
        self._limits = Lanes(connection.connect_async(url, connect_timeout=_CONNECT), PATIENCE)
        self._reads = Lanes(connection.connect_async(url, connect_timeout=_CONNECT), PATIENCE, most=_READS)
        self._news = News(self._redis, outage, draining)
        self._settings = settings
        self._metrics = metrics
        self._open: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def renew(self, settings: VerificationSettings) -> None:
        """Take over other settings, for what is written from here on."""
        self._settings = settings

    async def start(self) -> None:
        """Begin to listen for verdicts and to keep this process's intents alive."""
        self._tasks = [asyncio.create_task(self._news.listen()), asyncio.create_task(self._keep_open())]

    async def close(self) -> None:
        """Stop listening and close the connections."""
        await end(*self._tasks)
        for lanes in (self._intents, self._limits, self._reads):
            await lanes.close()
        await self._redis.aclose()

    async def open(self, generation: Generation) -> None:
        """Write the intent, durably where the settings say so. Raises StoreUnavailable, where Redis is silent for
        `PATIENCE` seconds and what durability may take.
        """
        lost_at = time.time() + self._settings.lost_after
        intent = orjson.dumps(generation.intent())
        began = time.monotonic()
        with self._asking.anything:
            written, durably = await self._intents.ask(
                open_intent(generation.id, intent, self._settings.verdict_ttl, lost_at)
            )
            answers = [written] if self._until_durable is None else [written, durably]
            durable.answer_of(self._durability, answers)
        self._metrics.stored.record(time.monotonic() - began)
        self._open.add(generation.id)

    def served(self, id: str) -> None:
        """The response is over: from here its worker has `lost_after` seconds, without our help."""
        self._open.discard(id)

    async def verification(self, id: str) -> dict[str, Any] | None:
        """The verification as stored, or None without a verdict. Raises StoreUnavailable."""
        return await self._document(verdict_key(id))

    async def intent(self, id: str) -> dict[str, Any] | None:
        """What was written before the request went up. Raises StoreUnavailable."""
        return await self._document(intent_key(id))

    async def standings(self, fields: Sequence[str]) -> list[bytes | None]:
        """Those fields of the `standings` hash. Raises StoreUnavailable."""
        async with self._asking.alone():
            return cast("list[bytes | None]", await self._redis.hmget(STANDINGS, list(fields)))

    async def standing(self, backend: str) -> tuple[dict[bytes, bytes], int]:
        """A backend's `standing` hash, and how many of its units are not in it yet. Raises StoreUnavailable."""
        async with self._asking.in_turn():
            pipeline = self._redis.pipeline(transaction=True)
            pipeline.hgetall(standing_key(backend))
            pipeline.llen(units_key(backend))
            stored, waiting = await pipeline.execute()
        return stored, waiting

    def script(self, text: str) -> AsyncScript:
        """A script for `call`, `count` and `call_all`."""
        return self._redis.register_script(text)

    async def call(self, script: AsyncScript, keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
        """What a script answers. Raises StoreUnavailable."""
        async with self._asking.in_turn():
            return await script(keys=list(keys), args=list(arguments))

    async def change(self, script: str, keys: Sequence[str], arguments: Sequence[bytes | str | int]) -> Any:
        """What a script answers by which an admin changes something: once that is as durable as the settings ask for.

        Raises StoreUnavailable, and NotDurable where it was done and may be lost.
        """
        with self._asking.aside:
            said, durably = await self._intents.ask(("EVAL", script, len(keys), *keys, *arguments))
            found = value_of(said)
        if found and self._until_durable is not None:
            durable.check(self._durability, durably)
        return found

    async def count(self, script: AsyncScript, keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
        """What a script answers that lets a request in, and that can be repeated: one round trip, which those who ask
        meanwhile share. Raises StoreUnavailable.
        """
        given = (len(keys), *keys, *arguments)
        with self._asking.aside:
            said, _ = await self._limits.ask(("EVALSHA", script.sha, *given))
            if isinstance(said, NoScriptError):
                said, _ = await self._limits.ask(("EVAL", cast("str", script.script), *given))
            return value_of(said)

    async def call_all(self, calls: Iterable[Call], mark: tuple[str, str]) -> None:
        """Call scripts, all or none, and leave a mark that it was done: a key and its value, for an hour.

        Raises StoreUnavailable: then it may have been done all the same. A script that fails is logged.
        """
        async with self._asking.alone(), self._redis.pipeline(transaction=True) as pipeline:
            for script, keys, arguments in calls:
                await script(keys=list(keys), args=list(arguments), client=pipeline)
            pipeline.set(*mark, ex=3600)
            answers = await pipeline.execute(raise_on_error=False)
        if failed := [each for each in answers if isinstance(each, Exception)]:
            logger.error("redis refuses", extra={"count": len(failed), "error": type(failed[0]).__name__})

    async def marked(self, mark: tuple[str, str]) -> bool:
        """Whether this is the mark that was left last. Raises StoreUnavailable."""
        key, value = mark
        async with self._asking.alone():
            return cast("bytes | None", await self._redis.get(key)) == value.encode()

    async def keys(self, known: bytes | None) -> tuple[bytes | None, list[bytes] | None]:
        """The version of the client keys, and all of them unless it is `known` (None). Raises StoreUnavailable."""
        async with self._asking.alone():
            version = await self._redis.get(KEYS_VERSION)
            if version is not None and version == known:
                return version, None
            pipeline = self._redis.pipeline(transaction=True)
            pipeline.get(KEYS_VERSION)
            pipeline.hvals(KEYS)
            version, stored = await pipeline.execute()
        return version, stored

    async def all_keys(self) -> list[bytes]:
        """The client keys as they are stored. Raises StoreUnavailable."""
        async with self._asking.in_turn():
            return cast("list[bytes]", await self._redis.hvals(KEYS))

    async def key(self, name: str) -> bytes | None:
        """One client key as it is stored. Raises StoreUnavailable."""
        async with self._asking.in_turn():
            return cast("bytes | None", await self._redis.hget(KEYS, name))

    async def wait(self, id: str, seconds: float) -> dict[str, Any] | None:
        """The verification as soon as there is one, None when the time is over. Raises StoreUnavailable."""

        async def look() -> dict[str, Any] | None:
            return await self.verification(id)

        return await self._news.wait(id, seconds, look)

    async def owner(self, id: str) -> str:
        """Whose generation this is. Raises NotFound and StoreUnavailable."""
        found = next((each for each in await self._documents(verdict_key(id), intent_key(id)) if each is not None), {})
        if "owner" not in found:
            raise NotFound("there is no such verification")
        return str(found["owner"])

    async def told(self, id: str, owner: str, seconds: float) -> dict[str, Any]:
        """What an owner may know of a generation: its verification as soon as there is one, or when the time is over,
        or the proxy drains, that it is pending. Waits through outages.

        Raises:
            NotFound: the owner has no such generation.
            StoreUnavailable: an outage outlasts the time.
        """
        asked: dict[str, Any] | None = None

        async def look() -> dict[str, Any] | None:
            nonlocal asked
            # One read, whatever is found, so that it does not tell an id of others from one that nobody has.
            found, intent = await self._documents(verdict_key(id), intent_key(id))
            asked = intent or asked
            known = found or asked
            if known is None or known.get("owner") != owner:
                raise NotFound("there is no such verification")
            return found

        found = await self._news.wait(id, seconds, look, patient=True)
        if found is not None:
            return found
        assert asked is not None
        return pending(asked)

    async def _document(self, key: str) -> dict[str, Any] | None:
        return (await self._documents(key))[0]

    async def _documents(self, *keys: str) -> list[dict[str, Any] | None]:
        with self._asking.aside:
            stored = value_of((await self._reads.ask(("MGET", *keys)))[0])
        found = [None if data is None else orjson.loads(data) for data in stored]
        assert all(each is None or isinstance(each, dict) for each in found)
        return found

    async def _keep_open(self) -> None:
        """Push the hour at which a running generation counts as lost ahead of us while we live."""
        while True:
            await asyncio.sleep(self._settings.lost_after / 3)
            with contextlib.suppress(StoreUnavailable):
                await self._push(list(self._open))

    async def _push(self, ids: Iterable[str]) -> None:
        lost_at = time.time() + self._settings.lost_after
        if scores := dict.fromkeys(ids, lost_at):
            async with self._asking.alone():
                await self._redis.zadd(OPEN, scores, xx=True)
