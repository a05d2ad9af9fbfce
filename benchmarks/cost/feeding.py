"""Finished generations on their way into the pool, by the proxy's own recorder, and what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import TracebackType
from typing import Any

import orjson
from redis.asyncio import Redis

from benchmarks.cost.stack import Pool
from policies.evidence import Evidence
from proxy.generation import Generation
from proxy.metrics import Metrics
from proxy.outage import Outage
from proxy.recorder import Recorder
from proxy.store import Store
from verifier_pool import RQ_PREFIX
from verifier_pool.queue import VERDICTS, verdict_key

OWNER = "0" * 64
STAGES = {"first": "", "replay": "-r", "judge": "-j"}
"""Jobs of one generation, by what they add to its id."""


@dataclass(slots=True)
class Fed:
    """One generation in the pool. Times in Unix seconds; `stages` holds (queued, started, ended) of its jobs."""

    id: str
    tokens: int
    sent: float
    decided: float | None = None
    verdict: str = ""
    reasons: tuple[str, ...] = ()
    stages: dict[str, tuple[float, float, float]] = field(default_factory=dict)

    @property
    def latency(self) -> float | None:
        """Seconds from the response's end to its verdict."""
        return None if self.decided is None else self.decided - self.sent

    @property
    def waited(self) -> float | None:
        """Seconds its jobs spent in queues; None when not all of them could be read."""
        if not self.stages:
            return None
        return sum(max(started - queued, 0.0) for queued, started, _ in self.stages.values())

    @property
    def replayed(self) -> float | None:
        """Seconds between the start and the end of its replay job."""
        found = self.stages.get("replay")
        return None if found is None else found[2] - found[1]


class Feeder:
    """Plays the proxy: intents by its store, evidence and jobs by its recorder. An asynchronous context manager."""

    def __init__(self, pool: Pool) -> None:
        outage, metrics = Outage(), Metrics()
        self._store = Store(pool.url, pool.settings.verification, outage, metrics)
        self._recorder = Recorder(pool.url, pool.settings, outage, metrics)
        self._redis = Redis.from_url(pool.url)
        self._open: dict[str, Fed] = {}
        self._fresh: list[Fed] = []
        self._event = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Feeder:
        await self._store.start()
        self._recorder.start()
        channel = self._redis.pubsub(ignore_subscribe_messages=True)
        await channel.subscribe(VERDICTS)
        self._tasks = [asyncio.create_task(self._listen(channel)), asyncio.create_task(self._collect())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
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
        await self._store.open(generation)
        fed = Fed(id, len(evidence.prompt_ids) + len(evidence.output_ids), time.time())
        self._open[id] = fed
        self._recorder.finished(generation, lambda: choices, evidence.claim_ids.nbytes + evidence.claim_logprobs.nbytes)
        self._store.served(id)
        return fed

    async def settle(self, patience: float) -> None:
        """Wait until all have their verdict and their jobs' times are read, or nothing came for `patience` seconds."""
        last, seen = time.monotonic(), len(self._open)
        while self._open or self._fresh:
            self._event.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await self._event.wait()
            if len(self._open) != seen:
                last, seen = time.monotonic(), len(self._open)
            elif time.monotonic() - last > patience:
                self._open.clear()
                return

    async def _listen(self, channel: Any) -> None:
        async for message in channel.listen():
            now = time.time()
            fed = self._open.pop(message["data"].decode(), None)
            if fed is not None:
                fed.decided = now
                self._fresh.append(fed)
                self._event.set()

    async def _collect(self) -> None:
        """Read what Redis forgets a minute after a job's end, in batches, so that reading costs little."""
        while True:
            await asyncio.sleep(0.5)
            batch = self._fresh[:256]
            if not batch:
                continue
            pipeline = self._redis.pipeline(transaction=False)
            for fed in batch:
                pipeline.get(verdict_key(fed.id))
                for suffix in STAGES.values():
                    pipeline.hmget(f"{RQ_PREFIX}:job:{fed.id}{suffix}", "enqueued_at", "started_at", "ended_at")
            found = await pipeline.execute()
            width = 1 + len(STAGES)
            for place, fed in enumerate(batch):
                document, *jobs = found[place * width : (place + 1) * width]
                if document is not None:
                    verification = orjson.loads(document)
                    fed.verdict, fed.reasons = verification["verdict"], tuple(verification.get("reasons", ()))
                fed.stages = {
                    stage: times for stage, job in zip(STAGES, jobs, strict=True) if (times := _times(job)) is not None
                }
            del self._fresh[: len(batch)]
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


def _times(job: Sequence[bytes | None]) -> tuple[float, float, float] | None:
    if any(each is None for each in job):
        return None
    queued, started, ended = (_unix(each.decode()) for each in job if each is not None)
    return (queued, started, ended)


def _unix(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
