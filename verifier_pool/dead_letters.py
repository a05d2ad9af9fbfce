"""Jobs that failed for good: which there are, and what can still be done about one.

A verdict is written once. Where a generation has its verdict, and a dead-lettered one nearly always has (`unverified`
with the reason), nothing that runs later changes it, so only what is undecided is queued anew, and webhooks. No letter
holds anything of a prompt or an answer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

import orjson
from redis import Redis
from rq.job import Job
from rq.registry import FailedJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer

from policies.settings import Settings
from policies.verification import unverified
from verifier_pool import RQ_PREFIX
from verifier_pool.fair import SUFFIXES, FairQueue
from verifier_pool.queue import EVENT, OPEN, WEBHOOK_QUEUE, event_key, evidence_key, intent_key, verdict_key
from verifier_pool.replays import FAILED, is_second, outcome_key
from verifier_pool.scripts import note_waiting
from verifier_pool.stages import Stages
from verifier_pool.store import Store
from verifier_pool.units import of_unverified
from verifier_pool.webhooks import disabled_key

OURS = "countersign-"
"""How the names of our queues begin."""
WEBHOOK = "webhook"

_STAGES = {suffix: stage for stage, suffix in SUFFIXES.items()}
_KIND = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_CHUNK = 500


@dataclass(frozen=True, slots=True)
class Letter:
    """One job that failed for good.

    Attributes:
        id: of its generation, or of what a webhook tells (`event:ID` for an event about no generation).
        job, queue, stage: its job.
        reason: type of the exception that ended it; `AbandonedJobError` when its worker died too often.
        failed: Unix second.
        tries: how often a worker took it.
        backend, model: of its generation, as far as they are still known.
        verdict: the word of the verdict, or None without one.
        why: the verdict's reasons.
    """

    id: str
    job: str
    queue: str
    stage: str
    reason: str
    failed: float
    tries: int
    backend: str
    model: str
    verdict: str | None
    why: tuple[str, ...]


def queues(redis: Redis) -> list[FairQueue]:
    """All our queues that ever had a job, by name."""
    keys = cast("set[bytes]", redis.smembers(FairQueue.redis_queues_keys))
    names = sorted(key.decode(errors="replace").rpartition(":queue:")[2] for key in keys)
    return [FairQueue(name, connection=redis) for name in names if name.startswith(OURS)]


def find(redis: Redis) -> list[Letter]:
    """Every dead letter, the oldest first."""
    letters = [letter for queue in queues(redis) for letter in _of(queue)]
    return sorted(letters, key=lambda letter: letter.failed)


def requeue(redis: Redis, settings: Settings, letter: Letter) -> str | None:
    """Queue a dead letter anew; returns why not, None when it was."""
    if letter.stage == WEBHOOK:
        return _deliver_again(redis, settings, letter)
    if letter.verdict is not None:
        why = f" ({', '.join(letter.why)})" if letter.why else ""
        return f"its verdict is {letter.verdict}{why}, and a verdict is written once"
    if not redis.exists(evidence_key(letter.id)):
        return "its evidence expired; a worker ends it as unverified"
    if letter.stage.startswith("replay") and redis.exists(outcome_key(letter.id, second=is_second(letter.job))):
        return "its generation is being judged without this replay"
    rules, now = settings.verification, time.time()
    with redis.pipeline() as pipeline:
        pipeline.multi()  # rq wants to begin it, and the old job has to go before
        _forget(redis, letter, pipeline)
        # From its first pass it continues where it was, and asks for this replay again.
        Stages(redis, rules).verify(letter.id, pipeline)
        pipeline.zadd(OPEN, {letter.id: now + rules.lost_after})
        note_waiting(pipeline, letter.id, letter.backend, now, rules.evidence_ttl)
        pipeline.execute()
    return None


def drop(redis: Redis, settings: Settings, letter: Letter) -> None:
    """Delete a dead letter. What is undecided ends as it would have: unverified, or judged without its replay."""
    if letter.verdict is None and letter.stage != WEBHOOK:
        if letter.stage.startswith("replay"):
            reason = f"{FAILED}: {letter.reason}"
            Stages(redis, settings.verification).give_up(letter.id, reason, second=is_second(letter.job))
        else:
            webhook = settings.webhook is not None
            store = Store(redis, verdict_ttl=settings.verification.verdict_ttl, webhook=webhook)
            intent = store.intent(letter.id)
            verification = unverified(letter.id, f"job_failed: {letter.reason}", intent, time.time())
            store.settle(verification, of_unverified(verification, intent))
    with redis.pipeline() as pipeline:
        _forget(redis, letter, pipeline)
        pipeline.execute()


def chosen(letters: Iterable[Letter], ids: Iterable[str]) -> tuple[list[Letter], list[str]]:
    """The letters named by these ids, of jobs or of generations, and the ids that name none."""
    wanted = dict.fromkeys(ids)
    found = [letter for letter in letters if letter.job in wanted or letter.id in wanted]
    named = {letter.job for letter in found} | {letter.id for letter in found}
    return found, [id for id in wanted if id not in named]


def _deliver_again(redis: Redis, settings: Settings, letter: Letter) -> str | None:
    if settings.webhook is None:
        return "the settings name no webhook"
    off = disabled_key(settings.webhook.url)
    if redis.exists(off):
        return f"its receiver answered 410 and is switched off; delete the Redis key {off} first"
    key = event_key(letter.id.removeprefix(EVENT)) if letter.id.startswith(EVENT) else verdict_key(letter.id)
    if not redis.exists(key):
        return "what was to be sent expired"
    job = Job.fetch(letter.job, connection=redis, serializer=JSONSerializer)
    job.started_at = job.ended_at = None
    job.retries_left, job.number_of_retries = 3, 0
    queue = FairQueue(letter.queue, connection=redis)
    with redis.pipeline() as pipeline:
        pipeline.multi()
        pipeline.zrem(queue.failed_job_registry.key, letter.job)
        pipeline.hdel(job.key, "takes")
        queue._enqueue_job(job, pipeline=pipeline)
        pipeline.execute()
    return None


def _forget(redis: Redis, letter: Letter, pipeline: Any) -> None:
    pipeline.zrem(FairQueue(letter.queue, connection=redis).failed_job_registry.key, letter.job)
    pipeline.delete(
        Job.key_for(letter.job), f"{RQ_PREFIX}:results:{letter.job}", f"{RQ_PREFIX}:executions:{letter.job}"
    )


def _of(queue: FairQueue) -> Iterator[Letter]:
    redis = queue.connection
    registry = FailedJobRegistry(queue=queue, connection=redis)
    jobs = registry.get_job_ids()
    for start in range(0, len(jobs), _CHUNK):
        chunk = jobs[start : start + _CHUNK]
        ids = [_generation(redis, queue.name, job) for job in chunk]
        pipeline = redis.pipeline(transaction=False)
        for job, id in zip(chunk, ids, strict=True):
            pipeline.hmget(Job.key_for(job), "ended_at", "takes", "meta")
            pipeline.xrevrange(f"{RQ_PREFIX}:results:{job}", count=1)
            pipeline.mget(verdict_key(id), intent_key(id))
        found = pipeline.execute()
        for at, (job, id) in enumerate(zip(chunk, ids, strict=True)):
            yield _letter(queue.name, job, id, *found[3 * at : 3 * at + 3])


def _letter(queue: str, job: str, id: str, fields: list[Any], results: list[Any], known: list[bytes | None]) -> Letter:
    ended, takes, meta = fields
    result = Result.restore(job, results[0][0].decode(), results[0][1], None) if results else None  # type: ignore[arg-type]
    verdict, intent = map(_document, known)
    about, options = verdict or intent, _document(meta)
    return Letter(
        id=id,
        job=job,
        queue=queue,
        stage=WEBHOOK
        if queue == WEBHOOK_QUEUE
        else str(options.get("stage") or _STAGES.get(job.removeprefix(id), "?")),
        reason=_reason(result.exc_string if result else None),
        failed=seconds(ended) or (result.created_at.timestamp() if result else 0.0),
        tries=int(takes or 0),
        backend=str(about.get("backend", "")),
        model=str(about.get("model", "")),
        verdict=str(verdict.get("verdict")) if verdict else None,
        why=tuple(map(str, verdict.get("reasons", ()))),
    )


def _generation(redis: Redis, queue: str, job: str) -> str:
    """Id of what a job is about. A webhook's job spells `event:ID` with a dash."""
    if queue != WEBHOOK_QUEUE:
        return job.partition("-")[0]
    name = job.removeprefix("webhook-")
    return EVENT + name.removeprefix("event-") if name.startswith("event-") else name


def _reason(text: str | None) -> str:
    """Type of the exception, from what rq kept of it; never its message, which may quote anything."""
    lines = (text or "").strip().splitlines()
    if not text or not lines:
        return "?"
    if "AbandonedJobError" in text:
        return "AbandonedJobError"
    if text.startswith("Job was stuck"):
        return "NeverStarted"
    # Ours begins with it; rq's own is a traceback, which ends with it.
    at = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    found = _KIND.match(at)
    return found.group().rpartition(".")[2] if found else "?"


def seconds(value: bytes | None) -> float:
    """Unix second of a moment as rq writes it; 0 where there is none."""
    try:
        found = datetime.strptime((value or b"").decode(), "%Y-%m-%dT%H:%M:%S.%fZ")
    except ValueError:
        return 0.0
    return found.replace(tzinfo=UTC).timestamp()


def _document(data: bytes | None) -> dict[str, Any]:
    try:
        value = orjson.loads(data or b"")
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
