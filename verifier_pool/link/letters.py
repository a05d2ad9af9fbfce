"""Jobs that failed for good: what is there to be seen of them. Nothing is changed here.

No letter holds anything of a prompt or an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redis import Redis
from rq.job import Job
from rq.registry import FailedJobRegistry
from rq.results import Result

from policies.documents import document
from verifier_pool import RQ_PREFIX
from verifier_pool.link.deliveries import delivery_key
from verifier_pool.link.fair import SUFFIXES, FairQueue
from verifier_pool.link.queue import WEBHOOK_QUEUE, intent_key, verdict_key
from verifier_pool.link.queues import queues, seconds

WEBHOOK = "webhook"

_STAGES = {suffix: stage for stage, suffix in SUFFIXES.items()}
_KIND = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_CHUNK = 500


@dataclass(frozen=True, slots=True)
class Letter:
    """One job that failed for good.

    Attributes:
        id: of its generation, or of the event that a webhook is told.
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


def find(redis: Redis) -> list[Letter]:
    """Every dead letter, the oldest first."""
    letters = [letter for queue in queues(redis) for letter in _of(queue)]
    return sorted(letters, key=lambda letter: letter.failed)


def chosen(letters: Iterable[Letter], ids: Iterable[str]) -> tuple[list[Letter], list[str]]:
    """The letters named by these ids, of jobs or of generations, and the ids that name none."""
    wanted = dict.fromkeys(ids)
    found = [letter for letter in letters if letter.job in wanted or letter.id in wanted]
    named = {letter.job for letter in found} | {letter.id for letter in found}
    return found, [id for id in wanted if id not in named]


def shown(letter: Letter, now: float) -> dict[str, Any]:
    """A letter as JSON, with its age in seconds."""
    found = {name: value for name, value in asdict(letter).items() if name != "failed"}
    return found | {"age_seconds": round(now - letter.failed, 3) if letter.failed else None}


def _of(queue: FairQueue) -> Iterator[Letter]:
    redis = queue.connection
    registry = FailedJobRegistry(queue=queue, connection=redis)
    jobs = registry.get_job_ids()
    for start in range(0, len(jobs), _CHUNK):
        chunk = jobs[start : start + _CHUNK]
        ids = _generations(redis, queue.name, chunk)
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
    verdict, intent = (document(each) or {} for each in known)
    about, options = verdict or intent, document(meta) or {}
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


def _generations(redis: Redis, queue: str, jobs: Sequence[str]) -> list[str]:
    """Ids of what jobs are about. A webhook's job names a delivery, which knows; once that is gone, it is that."""
    if queue != WEBHOOK_QUEUE:
        return [job.partition("-")[0] for job in jobs]
    pipeline = redis.pipeline(transaction=False)
    names = [job.removeprefix(f"{WEBHOOK}-") for job in jobs]
    for name in names:
        pipeline.hget(delivery_key(name), "event")
    return [name if event is None else event.decode() for name, event in zip(names, pipeline.execute(), strict=True)]


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
