"""One worker process on one queue: rq's bookkeeping under a loop that outlives Redis and stops politely.

rq's own `work()` quits when Redis goes away, reports no heartbeat while a job runs in its process, and needs a
second process for retries that wait. This loop leaves the state machine of a job to rq and does those three.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from rq import Queue
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job, JobStatus
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import now

from verifier_pool import metrics
from verifier_pool.link.queue import WEBHOOK_QUEUE
from verifier_pool.rq_job import OurJob, OurQueue, place_of
from verifier_pool.runtime import ANSWER_SECONDS
from verifier_pool.standstill import Standstill
from verifier_pool.upkeep import Upkeep

logger = logging.getLogger(__name__)


def counted(on_failed: Callable[[str, str], None], queue: str) -> Callable[[str, str], None]:
    """The same, with what failed for good counted: once, though a failure is told twice, with its exception first."""
    last = ""

    def count(job_id: str, reason: str) -> None:
        nonlocal last
        if job_id != last:
            metrics.gave_up(queue, reason)
        last = job_id
        on_failed(job_id, reason)

    return count


class Loop(Upkeep):
    """Takes jobs until `stop` is set; a job that runs then is finished first.

    Args:
        on_failed: called with a job's id and a reason when it failed for good (retries exhausted, its worker
            killed too often, refused).
        on_tick: called between jobs, about once a second.
        on_timer: called every `timer_seconds` by a thread, so also during a long job.
        standstill: what this process's jobs come to; without it every failure is the job's own.

    Class attributes are seconds. A worker killed with its job is noticed after `patience` and a maintenance. One that
    did not come around between jobs for `hung_seconds` ends itself, for its supervisor to start it again.
    """

    job_class = OurJob
    patience = 25
    pulse = 5.0
    timer_seconds = 10.0
    watchdog_grace = 60.0
    hung_seconds = 360.0
    connection_timeout = round(ANSWER_SECONDS)
    log_result_lifespan = False

    def __init__(
        self,
        queue: str,
        redis: Redis,
        stop: threading.Event,
        *,
        on_failed: Callable[[str, str], None],
        on_tick: Callable[[], object] | None = None,
        on_timer: Callable[[], object] | None = None,
        standstill: Standstill | None = None,
        maintenance_interval: int = 10,
    ) -> None:
        super().__init__(
            [OurQueue(queue, connection=redis, serializer=JSONSerializer, job_class=OurJob)],
            connection=redis,
            worker_ttl=45,
            maintenance_interval=maintenance_interval,
            serializer=JSONSerializer,
            exception_handlers=[self._on_exception],
            log_job_description=False,
        )
        self._stop = stop
        self._on_failed = counted(on_failed, queue)
        self._stage = "webhook" if queue == WEBHOOK_QUEUE else "verify"
        self._on_tick = on_tick
        self._on_timer = on_timer
        self._standstill = standstill
        self._running: tuple[Job, Execution, float] | None = None
        self._came_around: float | None = time.monotonic()

    def serve(self, burst: bool = False) -> int:
        """Work; returns how many jobs ran. With `burst` it ends when no job waits or is due.

        Raises:
            RedisError: Redis went away. The job at hand, if any, is retried by whoever comes next.
        """
        done = 0
        with self._present():
            next_tick = 0.0
            while not self._stop.is_set():
                self._came_around = time.monotonic()
                if time.monotonic() >= next_tick:
                    self._tick()
                    next_tick = time.monotonic() + 1
                if self._standstill is not None and self._standstill.wait:
                    if burst:
                        break
                    self._stop.wait(min(self._standstill.wait, 0.5))
                    continue
                taken = self._take(None if burst else 1)
                if taken is not None:
                    self.execute_job(*taken)
                    done += 1
                elif burst:
                    break
        return done

    @contextmanager
    def _present(self) -> Iterator[None]:
        """Registered as a worker, with a thread that keeps it and its jobs from being taken for dead."""
        self.bootstrap("WARNING")
        ended = threading.Event()
        pulse = threading.Thread(target=self._pulse, args=(ended,), name="pulse", daemon=True)
        pulse.start()
        try:
            yield
        except RedisError:
            self._hang_up()
            raise
        finally:
            ended.set()
            pulse.join(timeout=self.pulse)
            self._leave()

    def execute_job(self, job: Job, queue: Queue) -> None:
        with self.connection.pipeline() as pipeline:
            execution = self._begin(job, pipeline)
            pipeline.execute()
        began = time.monotonic()
        stage = metrics.stage_of(job.meta, self._stage)
        metrics.taken(stage, job.enqueued_at)
        self._running, well = (job, execution, began), False
        try:
            well = self.perform_job(job, queue, execution)
        finally:
            self._came_around = time.monotonic()
            self._running = None
            metrics.ran(stage, self._came_around - began, well=well)

    def prepare_job_execution(self, job: Job, remove_from_intermediate_queue: bool = False) -> None:
        """`_begin` did it, in one step with the rest."""

    def handle_execution_ended(self, job: Job, queue: Queue, heartbeat_ttl: int) -> None:
        """Its execution ends with it, so it needs no further heartbeat."""
        job.ended_at = now()

    def handle_job_success(
        self, job: Job, queue: Queue, started_job_registry: object, execution: Execution, **_: object
    ) -> None:
        """In one round trip: our jobs have no dependents, repeats or rate limits to look after."""
        with self.connection.pipeline() as pipeline:
            self._succeed(job, execution, pipeline)
            self.increment_successful_job_count(pipeline=pipeline)
            pipeline.execute()
        if self._standstill is not None:
            self._standstill.succeeded()

    def handle_job_failure(self, job: Job, queue: Queue, *args: Any, **kwargs: Any) -> None:
        kind, error, trace = sys.exc_info()
        if kind is not None:
            # rq would keep the message too, and an engine's may quote the prompt.
            kwargs["exc_string"] = place_of(kind, trace)
        del error, trace
        super().handle_job_failure(job, queue, *args, **kwargs)
        if not job.should_retry and job.get_status(refresh=False) == JobStatus.FAILED:
            self._on_failed(job.id, "job_failed")

    def handle_exception(self, job: Job, *exc_info: Any) -> None:
        """Logs where it went wrong; what is not the job's fault is tried again as if it had not been tried."""
        kind, error, trace = exc_info
        logger.error("job %s raised %s", job.id, place_of(kind, trace))
        if self._standstill is not None and isinstance(job, OurJob):
            job.held = self._standstill.failed(job.id, error)
            if job.held:
                job.retries_left = (job.retries_left or 0) + 1
        self._on_exception(job, kind, error, trace)

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        return self.patience

    def subscribe(self) -> None:
        """No remote control: commands over a channel would let anybody in Redis stop a worker."""

    def unsubscribe(self) -> None:
        """Nothing was subscribed."""

    def procline(self, message: str) -> None:
        """The process keeps its name."""

    def _begin(self, job: Job, pipeline: Any) -> Execution:
        """Move a taken job from the intermediate list to those that run, as rq does, with whatever else is begun."""
        execution = Execution.create(job, self.patience, pipeline=pipeline, worker_name=self.name)
        job.prepare_for_execution(self.name, pipeline)
        pipeline.persist(job.key)
        pipeline.lrem(self.queues[0].intermediate_queue_key, 1, job.id)
        self.executions[execution.id] = execution
        return execution

    def _succeed(self, job: Job, execution: Execution, pipeline: Any) -> None:
        """End a job that did its work, as rq does; one whose result nobody reads leaves nothing behind."""
        self.cleanup_execution(job, pipeline=pipeline, execution=execution)
        ttl = job.get_result_ttl(self.default_result_ttl)
        if ttl == 0:
            results = Result.get_key(job.id)  # type: ignore[no-untyped-call]
            pipeline.delete(job.key, results, ExecutionRegistry(job.id, self.connection).key)
            return
        job._handle_success(
            ttl,
            pipeline=pipeline,
            worker_name=self.name,
            execution_id=execution.id,
            execution_started_at=execution.created_at,
            execution_ended_at=job.ended_at,
        )
        job.cleanup(ttl, pipeline=pipeline, remove_from_queue=False)

    def _tick(self) -> None:
        self._stay_listed()
        if self.should_run_maintenance_tasks:
            self._keep_up()
        self._release_due()
        if self._on_tick is not None:
            self._on_tick()

    def _pulse(self, ended: threading.Event) -> None:
        next_timer = 0.0
        while not ended.wait(self.pulse):
            try:
                self._watch()
                self._beat()
                if self._on_timer is not None and time.monotonic() >= next_timer:
                    next_timer = time.monotonic() + self.timer_seconds
                    self._on_timer()
            except RedisError as error:
                logger.warning("no heartbeat: %s", type(error).__name__)
            except Exception:
                logger.exception("the timer failed")

    def _watch(self) -> None:
        """End this process when its main thread hangs."""
        running, came_around = self._running, self._came_around
        if running is not None:
            job, _, since = running
            if time.monotonic() - since > (job.timeout or 0) + self.watchdog_grace:
                # The alarm of the time-out never reached Python: something hangs in native code.
                logger.critical("job %s hangs %d s past its time-out; this worker ends", job.id, self.watchdog_grace)
                os._exit(70)
        elif came_around is not None and time.monotonic() - came_around > self.hung_seconds:
            logger.critical("the loop of %s hangs; this process ends", self.queues[0].name)
            os._exit(70)

    def _beat(self) -> None:
        running = self._running
        if running is not None:
            job, execution, _ = running
            self.maintain_heartbeats(job, execution)

    def _hang_up(self) -> None:
        """Let go of pooled connections: what took one of them most likely took the others, each good for a time-out."""
        self.connection.connection_pool.disconnect(inuse_connections=False)

    def _on_exception(self, job: Job, kind: type[BaseException], error: BaseException, trace: Any) -> bool:
        """Also called for a job whose worker was killed, which passes by `handle_job_failure`."""
        logger.warning("job %s: %s", job.id, kind.__name__)
        if not job.should_retry:
            self._on_failed(job.id, f"job_failed: {kind.__name__}")
        return True

    def _leave(self) -> None:
        try:
            self.register_death()  # type: ignore[no-untyped-call]
        except RedisError:
            logger.warning("Redis is gone; this worker's record there expires by itself")
