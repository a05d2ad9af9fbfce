"""What Redis holds of all proxies and workers together, as metrics: queues, what waits, what verdicts said.

Every proxy says the same, so queries take the maximum over them, not the sum. What is read takes two round trips and no
command that grows with the traffic: sizes, ends of sorted sets, and hashes whose fields are words of ours.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from redis import Redis
from redis.exceptions import RedisError
from rq.job import Job
from rq.utils import utcparse
from rq.worker_registration import WORKERS_BY_QUEUE_KEY

from policies import tally
from policies.settings import BackendSettings, Settings
from policies.unit import declaration_name, declaration_of
from verifier_pool import connection
from verifier_pool.fair import FairQueue
from verifier_pool.meters import Family, Kind, Labels, family
from verifier_pool.queue import (
    CANARIES,
    OPEN,
    OUTBOX,
    SECOND_UNCHECKED,
    STANDINGS,
    UNITS_DROPPED,
    VERIFY_QUEUE,
    WEBHOOK_QUEUE,
    queue_of,
    standing_field,
    tally_key,
    units_key,
    waiting_key,
)

ANSWER_SECONDS = 2.0
"""How long Redis may take to answer."""
FRESH_SECONDS = 2.0
"""For how long what was read is told again: several readers ask Redis as often as one."""

Found = list[tuple[float, Labels]]


@dataclass(frozen=True, slots=True)
class _Queue:
    """A queue by what it is called in labels, and its names in Redis."""

    queue: FairQueue
    labels: dict[str, str]

    @property
    def workers_key(self) -> str:
        return WORKERS_BY_QUEUE_KEY % self.queue.name


class Fleet:
    """Reads for one process; any thread may ask. `close` lets go of its connection."""

    def __init__(self, url: str, settings: Settings) -> None:
        self._redis = connection.connect(url, timeout=ANSWER_SECONDS, connect_timeout=ANSWER_SECONDS, retries=0)
        self._lock = threading.Lock()
        self.renew(settings)

    def renew(self, settings: Settings) -> None:
        """Take over other models and backends."""
        with self._lock:
            self._queues = list(_queues(self._redis, settings))
            self._models = {backend.name: backend.model for backend in settings.backends}
            self._fields = [_field_of(backend) for backend in settings.backends]
            self._references = {name for name, model in settings.models.items() if model.reference}
            self._ttl = settings.verification.evidence_ttl
            self._read_at = float("-inf")
            self._known: list[Family] = []

    def read(self) -> list[Family]:
        """The metrics, at most `FRESH_SECONDS` old; none while Redis does not answer."""
        with self._lock:
            if time.monotonic() >= self._read_at + FRESH_SECONDS:
                try:
                    self._known = [*self._of_queues(), *self._of_backends()]
                except (RedisError, OSError):
                    self._known = []
                self._read_at = time.monotonic()
            return self._known

    def close(self) -> None:
        """Disconnect."""
        self._redis.close()

    # Queues

    def _of_queues(self) -> Iterator[Family]:
        pipeline = self._redis.pipeline(transaction=False)
        for each in self._queues:
            _ask_of_queue(pipeline, each)
        pipeline.zcard(OUTBOX)
        pipeline.zrange(OUTBOX, 0, 0, withscores=True)
        pipeline.zcard(OPEN)
        *said, outbox, first, undecided = pipeline.execute()
        width = len(said) // max(len(self._queues), 1)
        asked = [said[at * width : (at + 1) * width] for at in range(len(self._queues))]
        pipeline = self._redis.pipeline(transaction=False)
        for *_, head, tail, _, workers in asked:
            for id in (head, tail):
                pipeline.hget(Job.key_for((id or b"none").decode(errors="replace")), "enqueued_at")
            for key in workers:
                pipeline.exists(key)
        answers = iter(pipeline.execute())
        jobs, oldest, here = Found(), Found(), Found()
        now = time.time()
        for each, (*counts, running, taken, later, dead, _head, _tail, since, workers) in zip(
            self._queues, asked, strict=True
        ):
            ends = [_seconds(next(answers)) for _ in range(2)]
            numbers = {"waiting": sum(counts), "running": running + taken, "later": later, "dead": dead}
            jobs += [(count, each.labels | {"state": state}) for state, count in numbers.items()]
            begun = [score for _, score in since] + [at for at in ends if at is not None]
            oldest.append((max(0.0, now - min(begun)) if begun and numbers["waiting"] else 0.0, each.labels))
            here.append((sum(next(answers) for _ in workers), each.labels))
        by = ("queue", "model")
        yield family(*JOBS, (*by, "state"), jobs)
        yield family(*OLDEST, by, oldest)
        yield family(*WORKERS, by, here)
        yield family(*UNDELIVERED, (), [(outbox, {})])
        yield family(*UNDELIVERED_OLDEST, (), [(max(0.0, now - first[0][1]) if first else 0.0, {})])
        yield family(*UNDECIDED, (), [(undecided, {})])

    # Backends

    def _of_backends(self) -> Iterator[Family]:
        pipeline = self._redis.pipeline(transaction=False)
        names = list(self._models)
        for name in names:
            pipeline.hgetall(tally_key(name))
            pipeline.zrangebyscore(waiting_key(name), time.time() - self._ttl, "+inf", start=0, num=1, withscores=True)
            pipeline.llen(units_key(name))
        pipeline.hgetall(CANARIES)
        for key in (UNITS_DROPPED, SECOND_UNCHECKED):
            pipeline.hmget(key, ["", *names])
        pipeline.hmget(STANDINGS, ["", *self._fields])
        *said, canaries, dropped, unchecked, standings = pipeline.execute()
        now = time.time()
        verdicts, audited, reasons, checks = Found(), Found(), Found(), Found()
        oldest, units = Found(), Found()
        for at, name in enumerate(names):
            counted, first, waiting = said[3 * at : 3 * at + 3]
            labels = {"backend": name, "model": self._models[name]}
            told = tally.read((field.decode(errors="replace"), int(count)) for field, count in counted.items())
            verdicts += [(count, labels | {"verdict": word}) for (word,), count in told.verdicts.items()]
            audited.append((told.audited, labels))
            reasons += [
                (count, labels | {"verdict": word, "reason": code}) for (word, code), count in told.reasons.items()
            ]
            checks += [
                (count, labels | {"check": check, "result": result, "reason": code})
                for (check, result, code), count in told.checks.items()
            ]
            oldest.append((max(0.0, now - first[0][1]) if first else 0.0, labels))
            units.append((waiting, labels))
        by = ("backend", "model")
        yield family(*VERDICTS, (*by, "verdict"), verdicts)
        yield family(*AUDITED, by, audited)
        yield family(*REASONS, (*by, "verdict", "reason"), reasons)
        yield family(*CHECKS, (*by, "check", "result", "reason"), checks)
        yield family(*LAG, by, oldest)
        yield family(*UNITS, by, units)
        yield family(*DROPPED, by, self._by_backend(dropped[1:]))
        yield family(*UNREPEATED, by, self._by_backend(unchecked[1:]))
        yield family(*KNOWN_ANSWERS, ("model", "reference", "result"), self._canaries(canaries))
        entries = [_entry(data) for data in standings[1:]]
        for about, name in STANDING.items():
            yield family(*about, by, self._standing(entries, name))

    def _standing(self, entries: Sequence[dict[str, Any]], name: str) -> Found:
        found = Found()
        for (backend, model), entry in zip(self._models.items(), entries, strict=True):
            if isinstance(value := entry.get(name), int | float):
                found.append((value, {"backend": backend, "model": model}))
        return found

    def _by_backend(self, counts: Sequence[bytes | None]) -> Found:
        return [
            (int(count or 0), {"backend": name, "model": model})
            for (name, model), count in zip(self._models.items(), counts, strict=True)
        ]

    def _canaries(self, counts: dict[bytes, bytes]) -> Found:
        found = Found()
        for field, count in counts.items():
            model, _, result = field.decode(errors="replace").rpartition(":")
            first = model in self._references
            model = model if first else model.removesuffix(":second")
            if model in self._references:
                found.append(
                    (int(count), {"model": model, "reference": "first" if first else "second", "result": result})
                )
        return found


def _queues(redis: Redis, settings: Settings) -> Iterator[_Queue]:
    yield _Queue(FairQueue(VERIFY_QUEUE, redis), {"queue": "verify", "model": ""})
    for name, model in settings.models.items():
        if model.reference is not None:
            yield _Queue(FairQueue(queue_of(name), redis), {"queue": "replay", "model": name})
        if model.second_reference is not None:
            yield _Queue(FairQueue(queue_of(name, second=True), redis), {"queue": "second-replay", "model": name})
    if settings.webhook is not None:
        yield _Queue(FairQueue(WEBHOOK_QUEUE, redis), {"queue": "webhooks", "model": ""})


def _field_of(backend: BackendSettings) -> str:
    return standing_field(backend.name, declaration_name(declaration_of(backend)))


def _entry(data: bytes | None) -> dict[str, Any]:
    try:
        entry = orjson.loads(data or b"{}")
    except orjson.JSONDecodeError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _ask_of_queue(pipeline: Any, each: _Queue) -> None:
    queue = each.queue
    pipeline.llen(queue.key)
    for key in queue.lane_keys:
        pipeline.zcard(key)
    pipeline.zcard(queue.started_job_registry.key)
    pipeline.llen(queue.intermediate_queue_key)
    pipeline.zcard(queue.scheduled_job_registry.key)
    pipeline.zcard(queue.failed_job_registry.key)
    pipeline.lindex(queue.key, 0)
    pipeline.lindex(queue.key, -1)
    pipeline.zrange(queue.since_key, 0, 0, withscores=True)
    pipeline.smembers(each.workers_key)


def _seconds(text: bytes | None) -> float | None:
    try:
        return None if text is None else utcparse(text.decode()).timestamp()
    except (ValueError, UnicodeDecodeError):
        return None


About = tuple[str, Kind, str, str]

JOBS: About = (
    "countersign.queue.jobs",
    "gauge",
    "{job}",
    "Jobs of a queue: waiting, running, to be tried later, or dead letters",
)
OLDEST: About = ("countersign.queue.oldest", "gauge", "s", "Age of the oldest job that waits in a queue")
WORKERS: About = ("countersign.queue.workers", "gauge", "{process}", "Workers that take jobs of a queue")
UNDELIVERED: About = ("countersign.webhook.outbox", "gauge", "{event}", "Events that no delivery was queued for yet")
UNDELIVERED_OLDEST: About = ("countersign.webhook.outbox.oldest", "gauge", "s", "Age of the oldest of them")
UNDECIDED: About = (
    "countersign.undecided",
    "gauge",
    "{generation}",
    "Generations without a verdict, those being served among them",
)
VERDICTS: About = ("countersign.verdicts", "counter", "{generation}", "Verdicts")
AUDITED: About = ("countersign.audited", "counter", "{generation}", "Verdicts on audited generations")
REASONS: About = (
    "countersign.verdict.reasons",
    "counter",
    "{generation}",
    "Verdicts that gave a reason, by its code; one may give several",
)
CHECKS: About = ("countersign.checks", "counter", "{generation}", "What checks said, of all choices the worst, and why")
LAG: About = ("countersign.backlog.oldest", "gauge", "s", "Age of the oldest recorded generation without a verdict")
UNITS: About = ("countersign.standing.units.waiting", "gauge", "{unit}", "Units of evidence that no standing holds yet")
DROPPED: About = ("countersign.standing.units.dropped", "counter", "{unit}", "Units of evidence that were lost")
UNREPEATED: About = (
    "countersign.standing.units.unrepeated",
    "counter",
    "{unit}",
    "Accusing units whose replay the second reference could not repeat",
)
KNOWN_ANSWERS: About = (
    "countersign.canaries",
    "counter",
    "{event}",
    "Replays with known answers that passed or failed, restarts that followed, answers left undecided for them",
)
STANDING: dict[About, str] = {
    (
        "countersign.backend.evidence_log10",
        "gauge",
        "1",
        "Logarithm (base 10) of the evidence against a backend: its e-value",
    ): "evidence_log10",
    (
        "countersign.backend.evidence_needed_log10",
        "gauge",
        "1",
        "What that has to reach for an accusation",
    ): "needed_log10",
    (
        "countersign.backend.suspicion_log10",
        "gauge",
        "1",
        "Logarithm (base 10) of what makes a backend suspect, of recent answers alone",
    ): "suspicion_log10",
    ("countersign.backend.life", "gauge", "1", "Which life of the backend this is; a pardon begins another"): "life",
    ("countersign.backend.tokens.served", "counter", "{token}", "Output tokens of its answers in this life"): "served",
    ("countersign.backend.tokens.decided", "counter", "{token}", "Those of them that verdicts decided"): "decided",
}
"""Metrics of a backend's standing, by where `policies.standing.brief` has their values."""
