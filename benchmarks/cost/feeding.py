"""Finished generations on their way into the pool, by the proxy's own recorder, and what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import orjson
from redis.asyncio import Redis

from benchmarks.cost.stack import Pool
from policies.errors import StoreUnavailable
from policies.evidence import Evidence
from proxy.generation import Generation
from proxy.metrics import Metrics
from proxy.outage import Outage
from proxy.recorder import Recorder
from proxy.store import Store
from verifier_pool.link.queue import VERDICTS, verdict_key

OWNER = "0" * 64
OPEN_TRIES = 80


@dataclass(slots=True)
class Fed:
    """One generation in the pool. Times in Unix seconds; `decided` is when its verdict was announced."""

    id: str
    tokens: int
    sent: float
    decided: float | None = None
    verdict: str = ""
    reasons: tuple[str, ...] = ()

    @property
    def latency(self) -> float | None:
        """Seconds from the response's end to its verdict."""
        return None if self.decided is None else self.decided - self.sent


class Feeder:
    """Plays the proxy: intents by its store, evidence and jobs by its recorder. An asynchronous context manager."""

    def __init__(self, pool: Pool) -> None:
        outage, metrics = Outage(), Metrics()
        self._store = Store(pool.url, pool.settings.verification, outage, metrics)
        self._recorder = Recorder(pool.url, pool.settings, outage, metrics)
        self._redis = Redis.from_url(pool.url, socket_timeout=None)
        self._open: dict[str, Fed] = {}
        self._event = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Feeder:
        await self._store.start()
        self._recorder.start()
        channel = self._redis.pubsub(ignore_subscribe_messages=True)
        await channel.subscribe(VERDICTS)
        self._listener = asyncio.create_task(self._listen(channel))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._listener is not None
        self._listener.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._listener
        await asyncio.to_thread(self._recorder.stop)
        await self._store.close()
        await self._redis.aclose()

    async def feed(self, evidence: Evidence) -> Fed:
        """One more generation with that evidence, under an id of its own."""
        id = secrets.token_hex(16)
        generation = Generation(
            id=id,
            owner=OWNER,
            endpoint=evidence.endpoint,
            model=evidence.model,
            mode="async",
            stream=False,
            backend=evidence.backend,
        )
        choices = [replace(evidence, id=id, owner=OWNER)]
        await self._opened(generation)
        fed = Fed(id, len(evidence.prompt_ids) + len(evidence.output_ids), time.time())
        self._open[id] = fed
        self._recorder.finished(generation, lambda: choices, evidence.claim_ids.nbytes + evidence.claim_logprobs.nbytes)
        self._store.served(id)
        return fed

    async def _opened(self, generation: Generation) -> None:
        """Write the intent. Where the proxy would serve unverified, this waits: on a busy machine Redis may be late."""
        for left in reversed(range(OPEN_TRIES)):
            try:
                return await self._store.open(generation)
            except StoreUnavailable:
                if not left:
                    raise
                await asyncio.sleep(0.25)

    async def settle(self, patience: float) -> None:
        """Wait until all have their verdict, or none came for `patience` seconds; then the rest counts as missing."""
        assert self._listener is not None
        while self._open:
            self._event.clear()
            try:
                async with asyncio.timeout(patience):
                    await self._event.wait()
            except TimeoutError:
                self._open.clear()
            if self._listener.done():
                self._listener.result()

    async def look_up(self, fed: Sequence[Fed]) -> None:
        """Read the verdicts."""
        for at in range(0, len(fed), 256):
            part = fed[at : at + 256]
            documents = await self._redis.mget([verdict_key(one.id) for one in part])
            for one, document in zip(part, documents, strict=True):
                if document is not None:
                    verification = orjson.loads(document)
                    one.verdict, one.reasons = verification["verdict"], tuple(verification.get("reasons", ()))

    async def _listen(self, channel: Any) -> None:
        while True:
            message = await channel.get_message(timeout=1.0)
            if message is None:
                continue
            now = time.time()
            fed = self._open.pop(message["data"].decode(), None)
            if fed is not None:
                fed.decided = now
                self._event.set()


def words(fed: Iterable[Fed]) -> dict[str, int]:
    """How many ended with which verdict; `missing` has none, and an unverified one says why."""
    count: Counter[str] = Counter()
    for one in fed:
        if one.decided is None:
            count["missing"] += 1
        elif one.verdict == "unverified":
            count[f"unverified: {', '.join(one.reasons)}"] += 1
        else:
            count[one.verdict] += 1
    return dict(count)
