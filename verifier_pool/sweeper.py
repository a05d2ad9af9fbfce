"""Finds recorded generations whose verdict never came, and replays nobody came to, and sees to it that each ends.

While a CPU worker runs and Redis answers, every generation that Redis accepted has its verdict, or is `unverified` with
a reason, at the latest

- `lost_after` after its intent, where no evidence follows (`proxy_lost`);
- `evidence_ttl` + `lost_after` + 4 × (3 × `job_timeout` + 150 s) after its evidence. A job waits no longer than the
  evidence lives; without evidence only a job that runs right now is waited for, and one that lost its process runs
  again up to three times, each loss being noticed after at most 150 s;

and a few sweeps, which are `Loop.timer_seconds` apart. Without a crash it is `replay_wait` + 3 × `job_timeout` after
the first pass, and where the replay accuses and its reference is not shown sound up to twice that and `replay_wait`
more; all of it once more where a second reference confirms.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import cast

from redis import Redis
from rq.job import Job, JobStatus

from policies.settings import VerificationSettings
from policies.verification import unverified
from verifier_pool.link.queue import PREFIX, evidence_key, verdict_key
from verifier_pool.link.scripts import note_waiting
from verifier_pool.replays import BACKLOG, FAILED, REPLAYING, is_replay, is_second, outcome_key, response_of
from verifier_pool.stages import ALIVE, Stages, jobs_of
from verifier_pool.store import Store
from verifier_pool.units import of_unverified
from verifier_pool.vouching import Vouching

logger = logging.getLogger(__name__)

BATCH = 1000
RUNNING_SECONDS = 30
"""How soon something is looked at again that runs past its time."""
SWEEPING = PREFIX + "sweeping"
SWEEP_SECONDS = 8
"""Workers sweep in turn; one that dies over it keeps the others from it for so long."""


def sweep_in_turn(store: Store, settings: VerificationSettings) -> int:
    """`sweep`, unless another worker did it just now."""
    if not store.redis.set(SWEEPING, b"", nx=True, ex=SWEEP_SECONDS):
        return 0
    return sweep(store, settings)


def sweep(store: Store, settings: VerificationSettings, now: float | None = None) -> int:
    """Settle what is overdue; returns how many ids that closed.

    - a job of it waits or runs: looked at again later;
    - evidence is there but no job: the queue lost it, so it is queued anew and continues where it was;
    - no evidence, and nothing of it runs: `evidence_expired`, or `proxy_lost` where there never was any, because the
      proxy died between its intent and its evidence;
    - a job of it ran and failed for good, and whoever saw that died before saying so: `job_failed`.

    Replays that wait for too long are given up. Times are Redis's own: a worker whose clock is ahead must not end
    what others are at.
    """
    now = _clock(store.redis) if now is None else now
    stages = Stages(store.redis, settings)
    _give_up_replays(stages, now)
    Vouching(stages).sweep(now)
    ids = store.overdue(now, BATCH)
    statuses = stages.statuses([job for id in ids for job in jobs_of(id)])
    return sum(_swept(store, stages, settings, id, {job: statuses[job] for job in jobs_of(id)}, now) for id in ids)


def _swept(
    store: Store,
    stages: Stages,
    settings: VerificationSettings,
    id: str,
    by_job: Mapping[str, str | None],
    now: float,
) -> bool:
    evidence, decided, recorded = _present(store, id)
    statuses = set(by_job.values())
    if evidence or any(statuses):
        store.redis.set(_recorded_key(id), b"", ex=settings.evidence_ttl + 2 * settings.lost_after)
    if evidence and not decided:
        if ALIVE.isdisjoint(statuses):
            passes = [status for job, status in by_job.items() if not is_replay(job)]
            if JobStatus.FAILED.value in passes:
                return _settle(store, id, "job_failed", now)
            logger.warning(
                "verification %s is queued again: its evidence is there, its job is not", id, extra={"id": id}
            )
            pipeline = store.redis.pipeline()
            stages.verify(id, pipeline)
            backend = str((store.intent(id) or {}).get("backend", ""))
            note_waiting(pipeline, id, backend, now, settings.evidence_ttl)
            pipeline.execute()
        store.postpone(id, now + settings.lost_after)
        return False
    if not decided and JobStatus.STARTED.value in statuses:
        store.postpone(id, now + min(RUNNING_SECONDS, settings.lost_after))
        return False
    return _settle(store, id, "evidence_expired" if recorded or any(statuses) else "proxy_lost", now)


def _settle(store: Store, id: str, reason: str, now: float) -> bool:
    intent = store.intent(id)
    verification = unverified(id, reason, intent, now)
    if store.settle(verification, of_unverified(verification, intent)):
        logger.warning("verification %s ends unverified: %s", id, reason, extra={"id": id, "reason": reason})
    return True


def _give_up_replays(stages: Stages, now: float) -> None:
    """Judge without their replay those that wait too long, and those whose job failed before it could say so."""
    redis = stages.redis
    found = cast("list[bytes]", redis.zrangebyscore(REPLAYING, "-inf", now, 0, BATCH))
    jobs = [job.decode() for job in found]
    for job, status in stages.statuses(jobs).items():
        id, second = response_of(job), is_second(job)
        if redis.exists(outcome_key(id, second=second), verdict_key(id)):
            redis.zrem(REPLAYING, job)
        elif status == JobStatus.STARTED.value:
            redis.zadd(REPLAYING, {job: now + RUNNING_SECONDS}, xx=True)
        else:
            reason = FAILED if status == JobStatus.FAILED.value else BACKLOG
            logger.warning("replay %s is given up: %s", job, reason, extra={"id": id, "reason": reason})
            stages.give_up(id, reason, second=second)
            if reason == BACKLOG:
                redis.delete(Job.key_for(job))  # an id without a job is dropped when its turn comes


def _clock(redis: Redis) -> float:
    seconds, micros = redis.time()
    return seconds + micros / 1e6


def _present(store: Store, id: str) -> list[bool]:
    """Whether there is evidence, a verdict, and a sign that there was evidence."""
    pipeline = store.redis.pipeline(transaction=False)
    for key in (evidence_key(id), verdict_key(id), _recorded_key(id)):
        pipeline.exists(key)
    return [bool(each) for each in pipeline.execute()]


def _recorded_key(id: str) -> str:
    """Key that outlives the evidence, and says that there was some."""
    return f"{PREFIX}recorded:{id}"
