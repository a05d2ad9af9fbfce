"""What a worker does for its queue between jobs: it stays listed, brings back what was lost, queues what is due."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import cast

from redis.exceptions import RedisError, WatchError
from rq import Queue, SimpleWorker
from rq.exceptions import DequeueTimeout
from rq.job import Job, JobStatus
from rq.job_lifecycle import record_job_failure
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import current_timestamp, now, utcformat

from verifier_pool.link.connection import about_one_key
from verifier_pool.rq_job import OurJob, OurQueue, place_of

logger = logging.getLogger(__name__)


UNREADABLE = "job_unreadable"
LETTER_SECONDS = 7 * 86_400
"""How long a dead letter is kept whose own record does not say so any more."""


class Upkeep(SimpleWorker):
    """Between jobs. `_on_failed` hears of a job that failed for good, and why."""

    _on_failed: Callable[[str, str], None]

    def _keep_up(self) -> None:
        try:
            self._set_damaged_aside()
            self.run_maintenance_tasks()  # type: ignore[no-untyped-call]
        except RedisError as error:
            if not about_one_key(error):
                raise
            self._broke_off(error)
        except Exception as error:
            self._broke_off(error)

    def _broke_off(self, error: Exception) -> None:
        # Whoever works on is worth more than an upkeep that is complete.
        logger.error("upkeep failed: %s", place_of(type(error), error.__traceback__))
        self.last_cleaned_at = now()  # type: ignore[assignment]

    def _set_damaged_aside(self) -> None:
        """Bury the jobs at which rq's upkeep would break off, and never come to those behind them.

        They lost their process, while they ran or before they began, and their records cannot be read, or not brought
        back from.
        """
        queue = self.queues[0]
        running = queue.started_job_registry
        entries = cast("list[bytes]", self.connection.zrangebyscore(running.key, 0, current_timestamp()))
        owners = {entry: entry.rpartition(b":")[0] or entry for entry in entries}
        taken = cast("list[bytes]", self.connection.lrange(queue.intermediate_queue_key, 0, -1))
        for name in dict.fromkeys([*owners.values(), *taken]):
            if self._can_be_brought_back(name, begun=name in owners.values()):
                continue
            with self.connection.pipeline() as pipeline:
                for entry in (entry for entry, owner in owners.items() if owner == name):
                    pipeline.zrem(running.key, entry)
                pipeline.lrem(queue.intermediate_queue_key, 0, name)  # type: ignore[arg-type]
                left = pipeline.execute()
            if any(left):
                self._bury_damaged(name)

    def _can_be_brought_back(self, name: bytes, *, begun: bool) -> bool:
        """Whether upkeep gets past a job and does not lose it; one that is gone is no obstacle."""
        queue = self.queues[0]
        try:
            id = name.decode()
            if not self.connection.exists(OurJob.key_for(id)):
                return True
            job = OurJob.fetch(id, connection=self.connection, serializer=JSONSerializer)
            if job.origin != queue.name and not begun:
                return False
            with self.connection.pipeline() as pipeline:
                if job.retries_left and job.retries_left > 0:
                    job.retry(queue, pipeline)
                else:
                    record_job_failure(job, "", pipeline)
                pipeline.reset()  # tried, not done
        except RedisError as error:
            if not about_one_key(error):
                raise
            return False
        except Exception:
            return False
        return True

    def _bury_damaged(self, name: bytes) -> None:
        """A dead letter in place of a record that cannot be read."""
        queue = self.queues[0]
        try:
            id = name.decode()
        except UnicodeDecodeError:
            logger.error("a job whose id is none lost its process; dropped")
            return
        logger.error("job %s lost its process and cannot be read; it is a dead letter", id)
        key = OurJob.key_for(id)
        blank = OurJob(id, connection=self.connection, serializer=JSONSerializer)
        with self.connection.pipeline() as pipeline:
            pipeline.delete(key)
            pipeline.hset(key, mapping={"status": JobStatus.FAILED.value, "ended_at": utcformat(now())})
            pipeline.expire(key, LETTER_SECONDS)
            Result.create_failure(blank, LETTER_SECONDS, UNREADABLE, pipeline=pipeline)
            pipeline.zadd(queue.failed_job_registry.key, {id: current_timestamp() + LETTER_SECONDS})
            pipeline.execute()
        self._on_failed(id, UNREADABLE)

    def _take(self, timeout: int | None) -> tuple[Job, Queue] | None:
        """The next job; one that cannot be read is dropped. None where none comes in so many seconds, or at once."""
        while True:
            try:
                return OurQueue.dequeue_any(
                    self.queues, timeout, connection=self.connection, job_class=OurJob, serializer=JSONSerializer
                )
            except DequeueTimeout:
                return None
            except RedisError:
                raise
            except Exception as error:
                id = getattr(error, "job_id", None)
                if id is None:
                    raise
                logger.error("job %s cannot be read (%s); dropped", id, type(error).__name__)
                self.queues[0].intermediate_queue.remove(id)
                self._on_failed(id, UNREADABLE)

    def _stay_listed(self) -> None:
        """Alive among the workers; anew where Redis forgot that, or took this one for dead after a long outage."""
        with self.connection.pipeline(transaction=False) as pipeline:
            pipeline.hexists(self.key, "birth")
            pipeline.sismember(self.redis_workers_keys, self.key)
            self.heartbeat(pipeline=pipeline)
            known, listed, *_ = pipeline.execute()
        if not (known and listed):
            self.connection.delete(self.key)
            self.register_birth()  # type: ignore[no-untyped-call]

    def _release_due(self) -> None:
        """Queue the retries whose time has come. A rival worker doing the same wins or loses as a whole."""
        queue = self.queues[0]
        registry = queue.scheduled_job_registry
        with self.connection.pipeline() as pipeline:
            pipeline.watch(registry.key)  # type: ignore[no-untyped-call]
            due = registry.get_jobs_to_schedule()
            if not due:
                return
            jobs, unreadable = self._fetch(due)
            pipeline.multi()
            for job in jobs:
                queue._enqueue_job(job, pipeline=pipeline)
            pipeline.zrem(registry.key, *due)
            try:
                pipeline.execute()
            except WatchError:
                return
        for id in unreadable:
            logger.error("job %s cannot be read; dropped", id)
            self._on_failed(id, UNREADABLE)

    def _fetch(self, ids: Sequence[str]) -> tuple[list[OurJob], list[str]]:
        """The jobs of these ids that there still are, and the ids of those that cannot be read."""
        with self.connection.pipeline(transaction=False) as pipeline:
            for id in ids:
                pipeline.hgetall(OurJob.key_for(id))
            found = pipeline.execute(raise_on_error=False)
        jobs: list[OurJob] = []
        unreadable: list[str] = []
        for id, held in zip(ids, found, strict=True):
            if not held:
                continue
            if isinstance(held, RedisError) and not about_one_key(held):
                raise held
            job = OurJob(id, connection=self.connection, serializer=JSONSerializer)
            try:
                job.restore(held)
            except Exception:
                unreadable.append(id)
            else:
                jobs.append(job)
        return jobs, unreadable
