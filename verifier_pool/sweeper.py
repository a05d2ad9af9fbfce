"""Finds recorded generations whose verdict never came, and sees to it that each gets one."""

from __future__ import annotations

import logging
import time

from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from policies.settings import VerificationSettings
from policies.verification import unverified
from verifier_pool.queue import VERIFY_JOB, VERIFY_QUEUE, verify_options
from verifier_pool.scripts import note_waiting
from verifier_pool.store import Store
from verifier_pool.units import of_unverified

logger = logging.getLogger(__name__)

BATCH = 1000
ALIVE = frozenset({JobStatus.QUEUED, JobStatus.STARTED, JobStatus.SCHEDULED, JobStatus.DEFERRED})


def sweep(store: Store, settings: VerificationSettings, now: float | None = None) -> int:
    """Settle what is overdue; returns how many ids that closed.

    - its job waits or runs: looked at again later;
    - evidence is there but no job: the queue lost it, so it is queued anew, until the evidence expires;
    - no evidence but a job once: `evidence_expired`;
    - neither: the proxy died between its intent and its evidence, `proxy_lost`.
    """
    now = time.time() if now is None else now
    closed = 0
    for id in store.overdue(now, BATCH):
        status = _job_status(store, id)
        if status in ALIVE:
            store.postpone(id, now + settings.lost_after)
        elif store.evidence_exists(id) and not store.decided(id):
            _enqueue_again(store, settings, id, now)
            store.postpone(id, now + settings.lost_after)
        else:
            reason = "proxy_lost" if status is None else "evidence_expired"
            intent = store.intent(id)
            verification = unverified(id, reason, intent, now)
            if store.settle(verification, of_unverified(verification, intent)):
                logger.warning("verification %s ends unverified: %s", id, reason)
            closed += 1
    return closed


def _job_status(store: Store, id: str) -> JobStatus | None:
    try:
        return Job.fetch(id, connection=store.redis, serializer=JSONSerializer).get_status(refresh=False)
    except NoSuchJobError:
        return None


def _enqueue_again(store: Store, settings: VerificationSettings, id: str, now: float) -> None:
    logger.warning("verification %s is queued again: its evidence is there, its job is not", id)
    queue = Queue(VERIFY_QUEUE, connection=store.redis, serializer=JSONSerializer)
    pipeline = store.redis.pipeline()
    queue.enqueue(VERIFY_JOB, id, pipeline=pipeline, **verify_options(id, settings))
    note_waiting(pipeline, id, str((store.intent(id) or {}).get("backend", "")), now, settings.evidence_ttl)
    pipeline.execute()
