"""What Redis holds of all proxies and workers together, as metrics: queues, what waits, what verdicts said.

Every proxy says the same, so queries take the maximum over them, not the sum. What is read takes four round trips and
no command that grows with the traffic: sizes, ends of sorted sets, and hashes whose fields are words of ours.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from policies import tally
from policies.checks import VerdictWord
from policies.documents import document
from policies.settings import BackendSettings, Settings
from policies.unit import declaration_name, declaration_of
from verifier_pool.link import connection
from verifier_pool.link import fleet_names as about
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.meters import Family, Labels, family
from verifier_pool.link.queue import (
    CANARIES,
    ENDPOINTS,
    OPEN,
    OUTBOX,
    SECOND_UNCHECKED,
    STANDINGS,
    UNITS_DROPPED,
    UNTOLD,
    VERIFY_QUEUE,
    WEBHOOK_QUEUE,
    queue_of,
    standing_field,
    tally_key,
    units_key,
    waiting_key,
)
from verifier_pool.link.queues import states

ANSWER_SECONDS = 2.0
"""How long Redis may take to answer."""
FRESH_SECONDS = 2.0
"""For how long what was read is told again: several readers ask Redis as often as one."""

Found = list[tuple[float, Labels]]


class Fleet:
    """Reads for one process; any thread may ask. `close` lets go of its connection."""

    def __init__(self, url: str, settings: Settings) -> None:
        self._redis = connection.connect(url, timeout=ANSWER_SECONDS, connect_timeout=ANSWER_SECONDS, retries=0)
        self._lock = threading.Lock()
        self._held: tuple[Settings] | None = None
        self._wanted = (settings,)

    def renew(self, settings: Settings) -> None:
        """Take over other models and backends, from the next reading on; never waits for who reads now."""
        self._wanted = (settings,)

    def _follow(self) -> None:
        """Take over what was given since the last reading. `_lock` is held."""
        if self._held is self._wanted:
            return
        self._held = self._wanted
        (settings,) = self._held
        self._queues = list(_queues(self._redis, settings))
        self._own_webhook = settings.webhook is not None
        self._models = {backend.name: backend.model for backend in settings.backends}
        self._fields = [_field_of(backend) for backend in settings.backends]
        self._references = _references(settings)
        self._ttl = settings.verification.evidence_ttl
        self._read_at = float("-inf")
        self._known: list[Family] = []

    def read(self) -> list[Family]:
        """The metrics, at most `FRESH_SECONDS` old; none while Redis does not answer."""
        with self._lock:
            self._follow()
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
        now = time.time()
        found = states(self._redis, [queue for queue, _ in self._queues], now)
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.zcard(OUTBOX)
        pipeline.zrange(OUTBOX, 0, 0, withscores=True)
        pipeline.zcard(OPEN)
        pipeline.exists(ENDPOINTS)
        pipeline.get(UNTOLD)
        outbox, first, undecided, registered, untold = pipeline.execute()
        jobs, oldest, here = Found(), Found(), Found()
        for (_, labels), state in zip(self._queues, found, strict=True):
            if labels["queue"] == "webhooks" and not (self._own_webhook or registered):
                continue  # nobody has to take its jobs
            numbers = {"waiting": state.waiting, "running": state.running, "later": state.later, "dead": state.dead}
            jobs += [(count, labels | {"state": which}) for which, count in numbers.items()]
            oldest.append((state.oldest or 0.0, labels))
            here.append((state.workers, labels))
        by = ("queue", "model")
        yield family(*about.JOBS, (*by, "state"), jobs)
        yield family(*about.OLDEST, by, oldest)
        yield family(*about.WORKERS, by, here)
        yield family(*about.UNDELIVERED, (), [(outbox, {})])
        yield family(*about.UNDELIVERED_OLDEST, (), [(max(0.0, now - first[0][1]) if first else 0.0, {})])
        yield family(*about.UNTOLD, (), [(int(untold or 0), {})])
        yield family(*about.UNDECIDED, (), [(undecided, {})])

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
        oldest, units, tokens = Found(), Found(), list[tuple[dict[str, int], Labels]]()
        for at, name in enumerate(names):
            counted, first, waiting = said[3 * at : 3 * at + 3]
            labels = {"backend": name, "model": self._models[name]}
            told = tally.read((field.decode(errors="replace"), int(count)) for field, count in counted.items())
            words = dict.fromkeys(((str(word),) for word in VerdictWord), 0) | told.verdicts
            verdicts += [(count, labels | {"verdict": word}) for (word,), count in words.items()]
            audited.append((told.audited, labels))
            tokens.append((told.tokens, labels))
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
        yield family(*about.VERDICTS, (*by, "verdict"), verdicts)
        yield family(*about.AUDITED, by, audited)
        yield family(*about.REASONS, (*by, "verdict", "reason"), reasons)
        yield family(*about.CHECKS, (*by, "check", "result", "reason"), checks)
        for named, which in about.TOKENS.items():
            yield family(*named, by, [(counts[which], labels) for counts, labels in tokens])
        yield family(*about.LAG, by, oldest)
        yield family(*about.UNITS, by, units)
        yield family(*about.DROPPED, by, self._by_backend(dropped[1:]))
        yield family(*about.UNREPEATED, by, self._by_backend(unchecked[1:]))
        yield family(*about.KNOWN_ANSWERS, ("model", "reference", "result"), self._canaries(canaries))
        entries = [document(data) or {} for data in standings[1:]]
        for named, name in about.STANDING.items():
            yield family(*named, by, self._standing(entries, name))

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
        """As the caretakers of references count them: the second one's under `MODEL:second`."""
        return [
            (
                int(counts.get(f"{model}{':second' if which == 'second' else ''}:{result}".encode(), 0)),
                {"model": model, "reference": which, "result": result},
            )
            for model, which in self._references
            for result in ("passed", "failed", "restarts", "unsound")
        ]


def _references(settings: Settings) -> list[tuple[str, str]]:
    found = []
    for name, model in settings.models.items():
        found += [(name, "first")] if model.reference is not None else []
        found += [(name, "second")] if model.second_reference is not None else []
    return found


def _queues(redis: Redis, settings: Settings) -> Iterator[tuple[FairQueue, dict[str, str]]]:
    yield (FairQueue(VERIFY_QUEUE, redis), {"queue": "verify", "model": ""})
    for name, model in settings.models.items():
        if model.reference is not None:
            yield (FairQueue(queue_of(name), redis), {"queue": "replay", "model": name})
        if model.second_reference is not None:
            yield (FairQueue(queue_of(name, second=True), redis), {"queue": "second-replay", "model": name})
    yield (FairQueue(WEBHOOK_QUEUE, redis), {"queue": "webhooks", "model": ""})


def _field_of(backend: BackendSettings) -> str:
    return standing_field(backend.name, declaration_name(declaration_of(backend)))
