"""Evidence on its way to the workers: off the event loop, bounded, and never silently lost."""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec
from redis.client import Pipeline
from redis.exceptions import RedisError

from policies import codec, unit
from policies.errors import StoreUnavailable
from policies.evidence import Evidence
from policies.settings import Settings
from policies.verification import unverified
from proxy.generation import BACKLOG, INTERNAL_ERROR, NO_ANSWER, STORE_UNAVAILABLE, Generation
from proxy.metrics import Metrics
from proxy.outage import Outage
from proxy.responses import Finished, Packed, Unchecked, aside, enqueue, is_full, is_outage, trace
from proxy.room import Backlog, Room
from proxy.tap.compose import unreadable
from verifier_pool.link import connection, durable
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import (
    PREFIX,
    VERIFY_QUEUE,
    evidence_key,
)
from verifier_pool.link.receipts import Settler
from verifier_pool.link.sealing import Sealer
from verifier_pool.link.signing import signer_of
from verifier_pool.link.telemetry import names, spans
from verifier_pool.link.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_PATIENCE = 2.0
_PROBE = 0.25
_TURN_SECONDS = 0.0005
_PROBE_KEY = PREFIX + "probe"
_MOST_LOST = 100_000
_BATCH = 16
_DURABLE_BATCH = 64
"""Responses written at once, as far as so many are waiting; more where each write waits until it is durable."""


class Recorder:
    """One thread that packs evidence, stores it and queues its job.

    Bounded by its own room (`Room`) and by how far the workers are behind: what does not fit, or is shed at random
    within its backend's share of the queue (`policies.audit.admits`), gets the verdict `unverified: backlog`, and so
    does what a full Redis refuses. While Redis is down, or what is written does not get as durable as the settings
    want, the generations themselves are forgotten, their ids are kept (up to 100,000) and become
    `unverified: store_unavailable` when it is back.
    """

    def __init__(
        self,
        url: str,
        settings: Settings,
        outage: Outage,
        metrics: Metrics,
        *,
        tracing: Tracing | None = None,
        sealer: Sealer | None = None,
        max_items: int = 4096,
        max_bytes: int = 512 * 1024 * 1024,
    ) -> None:
        # The time-out is longer than the loop's: here nobody waits, and evidence may be megabytes.
        more = durable.seconds(settings.durability)
        self._redis = connection.connect(url, timeout=_PATIENCE + more, connect_timeout=_PATIENCE, retries=0)
        self._jobs = FairQueue(VERIFY_QUEUE, connection=self._redis)
        self._settler = Settler(self._redis, signer_of(self._redis, settings))
        self._settings = settings
        self._outage = outage
        self._metrics = metrics
        self._tracing = tracing
        self._sealer = sealer or Sealer()
        self._todo: queue.SimpleQueue[Finished | Unchecked | None] = queue.SimpleQueue()
        self._lost: deque[Unchecked] = deque(maxlen=_MOST_LOST)
        self._probe = connection.connect(url, timeout=_PROBE + more, connect_timeout=_PROBE, retries=0)
        self._next_probe = 0.0
        self._room = Room(max_items, max_bytes)
        self._backlog = Backlog(self._redis, settings, metrics)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def renew(self, settings: Settings) -> None:
        """Take over other settings, for what is recorded from here on; how durable that is stays."""
        self._settings = settings
        self._settler.signer.renew(settings.receipts)
        self._backlog.renew(settings)

    def start(self) -> None:
        """Start the thread. It computes while the event loop streams, which must not wait long for its turn."""
        sys.setswitchinterval(_TURN_SECONDS)
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """Finish what is queued, as far as Redis lets us, and end the thread."""
        self._todo.put(None)
        self._thread.join(timeout)
        if self._lost:
            logger.error("generations without a record at the end", extra={"count": len(self._lost)})
        self._redis.close()
        self._probe.close()

    def finished(
        self, generation: Generation, evidence: Callable[[], Sequence[Evidence]], size: int, sent: bytes = b""
    ) -> None:
        """Record a response; returns at once. `evidence` is called on the recorder's thread. `sent` is the request's
        body as it went up."""
        item = Finished(generation, evidence, size, time.time_ns() if generation.trace else 0, sent)
        if not generation.recorded:
            self.unchecked(item.unjudged(), STORE_UNAVAILABLE)
        elif self._room.take(generation.backend, size):
            self._todo.put(item)
        else:
            self.unchecked(item.unjudged(), BACKLOG)

    def unchecked(self, generation: Generation, reason: str) -> None:
        """Give a generation the verdict `unverified`; returns at once."""
        self._count(generation, reason)
        self._todo.put(Unchecked(generation, reason))

    def _run(self) -> None:
        while True:
            item: Finished | Unchecked | None
            try:
                item = self._todo.get(timeout=_PROBE)
            except queue.Empty:
                self._recover()
                self._refresh()
                continue
            if item is None:
                self._recover(now=True)
                return
            self._recover()
            self._do([item, *self._more()])

    def _refresh(self) -> None:
        if not self._outage.down:
            with self._minding([]):
                self._backlog.refresh()

    def _more(self) -> list[Finished | Unchecked]:
        """What else is to be done already: one round trip, and one wait for durability, serve several."""
        items: list[Finished | Unchecked] = []
        most = _BATCH if durable.command(self._settings.durability) is None else _DURABLE_BATCH
        with contextlib.suppress(queue.Empty):
            while len(items) < most - 1:
                item = self._todo.get_nowait()
                if item is None:
                    self._todo.put(None)
                    break
                items.append(item)
        return items

    def _do(self, items: Sequence[Finished | Unchecked]) -> None:
        ready: list[Packed] = []
        for item in items:
            if isinstance(item, Finished):
                self._room.leave(item.generation.backend, item.size)
            if self._outage.down:
                self._lose(item)
                continue
            with self._minding([item]):
                if isinstance(item, Unchecked):
                    self._decide(item.generation, item.reason)
                elif (packed := self._pack(item, ready)) is not None:
                    ready.append(packed)
        if ready:
            self._write(ready)

    @contextlib.contextmanager
    def _minding(self, items: Sequence[Finished | Unchecked]) -> Iterator[None]:
        """Nothing that goes wrong takes the thread with it, or leaves these without a verdict."""
        try:
            yield
        except Exception as error:
            if is_outage(error):
                self._failed(error)
                for item in items:
                    self._lose(item)
                return
            # A record that cannot be made is our own fault, or that of what somebody put under its name.
            for item in items:
                logger.exception("evidence could not be recorded", extra={"id": item.generation.id})
                if isinstance(item, Finished):
                    self.unchecked(item.unjudged(), INTERNAL_ERROR)

    def _pack(self, item: Finished, before: Sequence[Packed]) -> Packed | None:
        """What is stored of a response after those `before` it; None when it has its verdict already."""
        generation, choices = item.generation, item.evidence()
        if not choices:
            self._decide(item.unjudged(), NO_ANSWER)
            return None
        with aside():
            self._metrics.counted(generation, choices)
        found = _packed(item, choices, self._sealer)
        already = [len(each.data) for each in before if each.backend == found.backend]
        if self._backlog.admits(generation.backend, len(found.data), already):
            return found
        self._shed(found)
        return None

    def _write(self, batch: Sequence[Packed]) -> None:
        """Store evidence with its jobs, all or nothing; when Redis is full one by one, shedding what does not fit."""
        if self._outage.down:
            for each in batch:
                self._lose(each.item)
            return
        with self._minding([each.item for each in batch]):
            try:
                self._store(batch)
            except Exception as error:
                if not is_full(error) and (len(batch) == 1 or is_outage(error)):
                    raise
                if len(batch) == 1:
                    self._shed(batch[0])
                    return
                for each in batch:
                    self._write([each])
                return
            self._trace(batch, "queued")

    def _store(self, batch: Sequence[Packed]) -> None:
        pipeline = durable.transaction(self._redis, self._settings.durability, plain=True)
        pipeline.multi()
        for each in batch:
            self._queue(each, pipeline)
        pipeline.execute()

    def _queue(self, packed: Packed, pipeline: Pipeline) -> None:
        enqueue(packed, self._jobs, pipeline, self._settings.verification)

    def _trace(self, batch: Sequence[Packed], outcome: str) -> None:
        if self._tracing is not None:
            trace(self._tracing, batch, outcome)

    def _shed(self, packed: Packed) -> None:
        self._trace([packed], BACKLOG)
        generation = packed.item.unjudged()
        self._count(generation, BACKLOG)
        self._decide(generation, BACKLOG, sum(len(choice.output_ids) for choice in packed.choices))

    def _count(self, generation: Generation, reason: str) -> None:
        with aside():
            self._metrics.unrecorded.add(1, {"reason": reason, "backend": generation.backend})

    def _decide(self, generation: Generation, reason: str, tokens: int = 0) -> None:
        """Write `unverified` unless somebody decided already; it counts against the coverage of the backend."""
        began = time.time_ns()
        document = unverified(generation.id, reason, generation.intent(), time.time())
        ttl, webhook = self._settings.verification.verdict_ttl, self._settings.webhook is not None
        told = msgspec.json.encode(unit.of_unverified(document, generation.declaration, tokens))
        self._settler.settle(document, told, generation.facts(), ttl, webhook=webhook)
        if self._tracing is not None:
            self._tracing.past(names.VERDICT, generation.trace, began, None, spans.of_verdict(document))

    def _lose(self, item: Finished | Unchecked) -> None:
        if isinstance(item, Finished):
            self._count(item.generation, STORE_UNAVAILABLE)
            item = Unchecked(item.unjudged(), STORE_UNAVAILABLE)
        if len(self._lost) == _MOST_LOST:
            self._metrics.dropped.add(1)
        self._lost.append(item)

    def _recover(self, *, now: bool = False) -> None:
        """Ask, not too often, whether Redis is back, and if so tell of everything it missed."""
        if not (self._outage.down or self._lost) or (time.monotonic() < self._next_probe and not now):
            return
        self._next_probe = time.monotonic() + _PROBE
        try:
            # A write, and as durable as any: a full Redis, or one without its replicas, answers a PING too.
            asked = durable.transaction(self._probe, self._settings.durability)
            asked.set(_PROBE_KEY, b"", ex=60)
            asked.execute()
            self._outage.recovered()
            while self._lost:
                self._tell(self._lost[0])
                self._lost.popleft()
        except (RedisError, OSError, StoreUnavailable) as error:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """What fails for want of a connection of ours is told later, too, and is no outage."""
        if not connection.our_own(error):
            self._outage.failed(error)

    def _tell(self, item: Unchecked) -> None:
        """As `_decide`; one that can never be written is no reason to stop. Raises when Redis is away again."""
        try:
            self._decide(item.generation, item.reason)
        except Exception as error:
            if is_outage(error):
                raise
            logger.exception("a generation has no record", extra={"id": item.generation.id})


def _packed(item: Finished, choices: Sequence[Evidence], sealer: Sealer) -> Packed:
    """Evidence as it is stored; without what its backend said where that cannot be."""
    about = evidence_key(item.generation.id).encode()
    try:
        return Packed(item, sealer.seal(codec.pack(choices), about), choices)
    except Exception:
        logger.exception("evidence cannot be packed", extra={"id": item.generation.id})
        rest = [unreadable(choice) for choice in choices]
        return Packed(item, sealer.seal(codec.pack(rest), about), rest)
