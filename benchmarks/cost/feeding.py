"""Finished generations on their way into the pool, by the proxy's own recorder, and what becomes of them."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

import orjson
from redis.asyncio import Redis

from benchmarks.announced import Announced
from benchmarks.cost.stack import Pool
from policies.errors import StoreUnavailable
from policies.evidence import Evidence
from proxy.generation import Generation
from proxy.metrics import Metrics
from proxy.outage import Outage
from proxy.recorder import Recorder
from proxy.store import Store
from verifier_pool.link.queue import verdict_key

OWNER = "0" * 64
OPEN_TRIES = 80


@dataclass(slots=True)
class Fed:
    """One generation in the pool. Times on the event loop's clock; `decided` is when its verdict was announced."""

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
        self._announced = Announced(pool.url)
        self._open: dict[str, Fed] = {}

    async def __aenter__(self) -> Feeder:
        await self._store.start()
        self._recorder.start()
        await self._announced.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._announced.__aexit__(kind, error, at)
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
        fed = Fed(id, len(evidence.prompt_ids) + len(evidence.output_ids), asyncio.get_running_loop().time())
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
        while self._open:
            if not await self._announced.news(patience):
                self._open.clear()
            for id, at in self._announced.taken().items():
                if (fed := self._open.pop(id, None)) is not None:
                    fed.decided = at

    async def look_up(self, fed: Sequence[Fed]) -> None:
        """Read the verdicts."""
        for at in range(0, len(fed), 256):
            part = fed[at : at + 256]
            documents = await self._redis.mget([verdict_key(one.id) for one in part])
            for one, document in zip(part, documents, strict=True):
                if document is not None:
                    verification = orjson.loads(document)
                    one.verdict, one.reasons = verification["verdict"], tuple(verification.get("reasons", ()))


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
