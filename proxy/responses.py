"""Responses that are over: what is kept of them until they are recorded, what Redis is told, and what may go wrong."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import orjson
from redis.client import Pipeline
from redis.exceptions import ExecAbortError, OutOfMemoryError, RedisError

from policies.errors import StoreUnavailable
from policies.evidence import Evidence
from policies.settings import VerificationSettings
from proxy.generation import Generation
from verifier_pool.link import connection, fair
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import OPEN, VERIFY_JOB, evidence_key, intent_key
from verifier_pool.link.scripts import INTENT_SLACK, note_waiting
from verifier_pool.link.telemetry import names
from verifier_pool.link.telemetry.tracing import Attributes, Tracing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finished:
    """A response that is over; `evidence` turns what the tap saw into values, `size` is what it read (bytes), `since`
    when it came here (nanoseconds of Unix time), where it is traced, `sent` the request's body as it went up."""

    generation: Generation
    evidence: Callable[[], Sequence[Evidence]]
    size: int
    since: int = 0
    sent: bytes = b""

    def unjudged(self) -> Generation:
        """The response, where its receipt is all that will tell of it."""
        if self.sent and not self.generation.sent:
            self.generation.sent = hashlib.sha256(self.sent).hexdigest()
        return self.generation


@dataclass(frozen=True, slots=True)
class Unchecked:
    """One that is not verified, and why."""

    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True)
class Packed:
    """One with its evidence, as it is stored."""

    item: Finished
    data: bytes
    choices: Sequence[Evidence]

    @property
    def backend(self) -> str:
        """Whose it is."""
        return self.item.generation.backend


def enqueue(packed: Packed, jobs: FairQueue, pipeline: Pipeline, rules: VerificationSettings) -> None:
    """Store a response's evidence with its job, once the pipeline is executed."""
    generation, size = packed.item.generation, len(packed.data)
    options = fair.options(
        generation.id,
        rules,
        inline=generation.mode == "inline",
        tenant=generation.owner,
        tokens=sum(len(choice.prompt_ids) + len(choice.output_ids) for choice in packed.choices),
        size=size,
    )
    jobs.enqueue(VERIFY_JOB, generation.id, pipeline=pipeline, **options)
    pipeline.set(evidence_key(generation.id), packed.data, ex=rules.evidence_ttl)
    now = time.time()
    if now > generation.created + min(INTENT_SLACK, rules.lost_after):
        # The first one goes before the evidence does, soon where a verdict came meanwhile: it says what is kept.
        pipeline.set(intent_key(generation.id), orjson.dumps(generation.intent()), ex=rules.verdict_ttl)
    pipeline.zadd(OPEN, {generation.id: now + rules.lost_after})
    note_waiting(pipeline, generation.id, generation.backend, now, rules.evidence_ttl, size)


def trace(tracing: Tracing, batch: Sequence[Packed], outcome: str) -> None:
    """A span for each response: that it is recorded now, and how that ended."""
    for each in batch:
        generation = each.item.generation
        told: Attributes = {
            names.ID: generation.id,
            names.BACKEND: generation.backend,
            names.SIZE: len(each.data),
            names.CHOICES: len(each.choices),
            names.OUTCOME: outcome,
        }
        with aside():
            tracing.past(names.RECORD, generation.trace, each.item.since, None, told)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """What only tells of a response costs it no verdict when it fails."""
    try:
        yield
    except Exception:
        logger.exception("a response could not be told of")


def is_full(error: BaseException) -> bool:
    """Whether Redis has no memory for a write."""
    return isinstance(error, OutOfMemoryError) or (isinstance(error, ExecAbortError) and "OOM" in str(error))


def is_outage(error: BaseException) -> bool:
    """Whether an error says that Redis is away, and not only that something is wrong with one generation."""
    return isinstance(error, RedisError | OSError | StoreUnavailable) and not connection.about_one_key(error)
