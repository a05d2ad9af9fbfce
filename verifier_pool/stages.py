"""From one stage of a response's way to the next: the job is queued in the same step that stores what it works on.

    ID → (audited) → ID-r → ID-j → (accusing: canary → ID-v) → ID-r2 → ID-j2 → (still: canary → ID-v2) → verdict

Whoever dies between two steps leaves a job, or something that the sweeper finds. Everything here may run twice.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from redis import Redis
from rq.job import Job, JobStatus

from policies.documents import document
from policies.errors import ReplayError
from policies.settings import VerificationSettings
from policies.verification import traced
from verifier_pool.link.fair import LANES, SUFFIXES, FairQueue, Stage, options
from verifier_pool.link.queue import VERIFY_JOB, VERIFY_QUEUE, intent_key
from verifier_pool.link.scripts import add_waiting
from verifier_pool.link.sealing import Sealer
from verifier_pool.packing import pack_outcomes, pack_requests
from verifier_pool.reference.base import ReplayRequest
from verifier_pool.replays import (
    FAILED,
    REPLAY_JOB,
    REPLAYING,
    is_second,
    outcome_key,
    queue_of,
    replay_job,
    request_key,
    response_of,
    vouching_key,
)

ALIVE = frozenset(
    {JobStatus.QUEUED.value, JobStatus.STARTED.value, JobStatus.SCHEDULED.value, JobStatus.DEFERRED.value}
)


class Stages:
    """Queues the jobs of responses. Redis's own errors pass through.

    Args:
        sealer: seals what references are asked, and what came of it.
    """

    def __init__(self, redis: Redis, settings: VerificationSettings, sealer: Sealer | None = None) -> None:
        self.redis = redis
        self.settings = settings
        self.sealer = sealer or Sealer()
        self._verify = FairQueue(VERIFY_QUEUE, connection=redis)
        self._replay: dict[str, FairQueue] = {}

    def ask(
        self,
        id: str,
        model: str,
        requests: Sequence[ReplayRequest],
        intent: Mapping[str, Any] | None,
        *,
        second: bool = False,
    ) -> None:
        """Have a response replayed, unless that is under way.

        Args:
            requests: one for each choice that can be replayed, at least one.
            intent: of the response, which says who waits for it.
        """
        job = replay_job(id, second=second)
        status = self.statuses([job])[job]
        if status in ALIVE:
            return
        who = _who(intent, sum(request.tokens for request in requests))
        try:
            if status == JobStatus.FAILED.value:
                raise ReplayError(FAILED)  # whoever saw it died before saying so
            key = request_key(id, second=second)
            packed = self.sealer.seal(pack_requests(requests), key.encode())
        except ReplayError as error:
            self._answered(id, pack_outcomes([error]), who, second=second)
            return
        ttl = self.settings.evidence_ttl
        queue = self._queue_of(model, second)
        stage: Stage = "replay2" if second else "replay"
        kept = options(id, self.settings, stage=stage, **who | {"size": len(packed)}) | {"result_ttl": 0}
        kept["meta"]["backend"] = backend = str((intent or {}).get("backend", ""))
        kept["meta"] |= traced(intent or {})
        with self.redis.pipeline() as pipeline:
            queue.enqueue(REPLAY_JOB, id, second, pipeline=pipeline, **kept)
            pipeline.set(key, packed, ex=ttl)
            add_waiting(pipeline, id, backend, len(packed))
            pipeline.zadd(REPLAYING, {job: time.time() + self.settings.replay_wait}, nx=True)
            pipeline.execute()

    def asked(self, id: str, *, second: bool) -> bool:
        """Whether a replay of a response is under way, or waits, or was forgotten and has to be made again."""
        return bool(self.redis.exists(request_key(id, second=second), vouching_key(id, second=second)))

    def answer(self, id: str, outcomes: bytes, meta: Mapping[str, Any], pipeline: Any, *, second: bool = False) -> None:
        """Keep what came of a replay (`replays.pack_outcomes`) and queue the pass after it.

        Args:
            meta: of the replay's job.
            pipeline: runs it, in one transaction.
        """
        size = self._answer(id, outcomes, _who_of(meta), pipeline, second)
        if meta.get("backend"):
            add_waiting(pipeline, id, str(meta["backend"]), size - int(meta.get("size", 0)))

    def give_up(self, id: str, reason: str, *, second: bool) -> None:
        """Have a response judged without a replay, which ends for this reason unless another outcome is there."""
        # How many choices were asked about is not known here, and one outcome for all of them says so.
        self._answered(id, pack_outcomes([ReplayError(reason)]), _who(self._intent(id), 1), second=second)

    def judge_again(self, jobs: Sequence[str], waiting: str) -> None:
        """Queue the pass after a canary.

        Args:
            jobs: of the replays that it was about.
            waiting: key of the sorted set where they waited, which they leave.
        """
        intents = cast("list[bytes | None]", self.redis.mget([intent_key(response_of(job)) for job in jobs]))
        with self.redis.pipeline() as pipeline:
            for job, intent in zip(jobs, intents, strict=True):
                stage: Stage = "judge2_vouched" if is_second(job) else "judge_vouched"
                id = response_of(job)
                kept = options(id, self.settings, stage=stage, **_who(document(intent), 1))
                self._verify.enqueue(VERIFY_JOB, id, pipeline=pipeline, **kept)
            pipeline.zrem(waiting, *jobs)
            pipeline.execute()

    def backend_of(self, id: str) -> str:
        """Name of the backend of a response, or nothing where that is not known any more."""
        return str(self._intent(id).get("backend", ""))

    def verify(self, id: str, pipeline: Any = None) -> None:
        """Queue a response's first pass anew. It continues where the response is."""
        kept = options(id, self.settings, **_who(self._intent(id), 1)) | {"result_ttl": 0}
        self._verify.enqueue(VERIFY_JOB, id, pipeline=pipeline, **kept)

    def statuses(self, jobs: Sequence[str]) -> dict[str, str | None]:
        """Status of each job, None where there is none."""
        pipeline = self.redis.pipeline(transaction=False)
        for job in jobs:
            pipeline.hget(Job.key_for(job), "status")
        found = zip(jobs, pipeline.execute(), strict=True)
        return {job: status.decode(errors="replace") if status else None for job, status in found}

    def _answered(self, id: str, outcomes: bytes, who: Mapping[str, Any], *, second: bool) -> None:
        with self.redis.pipeline() as pipeline:
            self._answer(id, outcomes, who, pipeline, second)
            pipeline.execute()

    def _answer(self, id: str, outcomes: bytes, who: Mapping[str, Any], pipeline: Any, second: bool) -> int:
        """Returns how many bytes are kept."""
        stage: Stage = "judge2" if second else "judge"
        kept = options(id, self.settings, stage=stage, **who) | {"result_ttl": 0}
        self._verify.enqueue(VERIFY_JOB, id, pipeline=pipeline, **kept)
        key = outcome_key(id, second=second)
        sealed = self.sealer.seal(outcomes, key.encode())
        pipeline.set(key, sealed, nx=True, ex=self.settings.evidence_ttl)
        pipeline.zrem(REPLAYING, replay_job(id, second=second))
        pipeline.delete(request_key(id, second=second))
        return len(sealed)

    def _intent(self, id: str) -> dict[str, Any]:
        return document(cast("bytes | None", self.redis.get(intent_key(id)))) or {}

    def _queue_of(self, model: str, second: bool) -> FairQueue:
        name = queue_of(model, second=second)
        if name not in self._replay:
            self._replay[name] = FairQueue(name, connection=self.redis)
        return self._replay[name]


def jobs_of(id: str) -> list[str]:
    """Ids of all jobs that a response may have."""
    return [id + suffix for suffix in SUFFIXES.values()]


def _who(intent: Mapping[str, Any] | None, tokens: int) -> dict[str, Any]:
    known = intent or {}
    inline = known.get("mode") == "inline"
    return {"inline": inline, "tenant": str(known.get("owner", "")), "tokens": tokens, "size": 0}


def _who_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    lane = meta.get("lane")
    inline = isinstance(lane, int) and 1 <= lane <= len(LANES) and LANES[lane - 1].startswith("inline")
    tokens = meta.get("tokens")
    return {
        "inline": inline,
        "tenant": str(meta.get("tenant", "")),
        "tokens": tokens if isinstance(tokens, int) else 1,
        "size": 0,
    }
