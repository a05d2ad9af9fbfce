"""What a worker does for its queue between jobs: it stays listed, brings back what was lost, queues what is due."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from redis.exceptions import RedisError, WatchError
from rq import SimpleWorker
from rq.serializers import JSONSerializer
from rq.utils import now

from verifier_pool.rq_job import OurJob, place_of

logger = logging.getLogger(__name__)


class Upkeep(SimpleWorker):
    """Between jobs. `_on_failed` hears of a job that failed for good, and why."""

    _on_failed: Callable[[str, str], None]

    def _keep_up(self) -> None:
        try:
            self.run_maintenance_tasks()  # type: ignore[no-untyped-call]
        except RedisError:
            raise
        except Exception as error:
            # A job that cannot be read, say. Whoever works on is worth more than an upkeep that is complete.
            logger.error("upkeep failed: %s", place_of(type(error), error.__traceback__))
            self.last_cleaned_at = now()  # type: ignore[assignment]

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
            self._on_failed(id, "job_unreadable")

    def _fetch(self, ids: Sequence[str]) -> tuple[list[OurJob], list[str]]:
        """The jobs of these ids that there still are, and the ids of those that cannot be read."""
        with self.connection.pipeline(transaction=False) as pipeline:
            for id in ids:
                pipeline.hgetall(OurJob.key_for(id))
            found = pipeline.execute()
        jobs: list[OurJob] = []
        unreadable: list[str] = []
        for id, held in zip(ids, found, strict=True):
            if not held:
                continue
            job = OurJob(id, connection=self.connection, serializer=JSONSerializer)
            try:
                job.restore(held)
            except Exception:
                unreadable.append(id)
            else:
                jobs.append(job)
        return jobs, unreadable
