"""How jobs of replays end: what came of one is stored and the next pass queued, or it is tried again, or buried."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rq.job import JobStatus
from rq.utils import now

from policies.errors import ReplayError
from verifier_pool.flights import Fate, Flight
from verifier_pool.link.queue import RETRY_SECONDS
from verifier_pool.loop import Loop
from verifier_pool.packing import pack_outcomes
from verifier_pool.replays import FAILED, is_second, response_of
from verifier_pool.rq_job import place_of
from verifier_pool.stages import Stages

logger = logging.getLogger(__name__)


class ReplayEndings(Loop):
    """Ends jobs as rq does, each as commands of a transaction that ends many. May be called again where that failed."""

    def __init__(
        self, name: str, stages: Stages, stop: threading.Event, *, on_tick: Callable[[], object] | None = None
    ) -> None:
        super().__init__(name, stages.redis, stop, on_failed=self._give_up, on_tick=on_tick)
        self._stages = stages

    def _end_alone(self, flight: Flight, fate: Fate, pipeline: Any) -> None:
        """`_end`; a job at which that breaks takes no other down: it is a dead letter."""
        commands = self.connection.pipeline()
        try:
            self._end(flight, fate, commands)
        except Exception as error:
            logger.error("job %s cannot be ended: %s", flight.job.id, place_of(type(error), error.__traceback__))
            flight.failure = flight.failure or error
            commands = self.connection.pipeline()
            flight.job.meta = {}
            self._bury(flight, commands)
        pipeline.command_stack += commands.command_stack

    def _end(self, flight: Flight, fate: Fate, pipeline: Any) -> None:
        """What becomes of a job, as commands of one transaction. May be called again when that one failed."""
        job = flight.job
        job.ended_at = now()
        if flight.void:
            self._succeed(job, flight.execution, pipeline)
        elif fate is Fate.DONE:
            self._stages.answer(response_of(job.id), flight.packed, job.meta, pipeline, second=flight.second)
            self._succeed(job, flight.execution, pipeline)
        elif fate is Fate.AGAIN:
            tries = job.number_of_retries or 0
            self._again(flight, RETRY_SECONDS[tries], pipeline, number_of_retries=tries + 1)
        elif job.retries_left:
            wait = job.get_retry_interval()
            self._again(flight, wait, pipeline, retries_left=job.retries_left - 1)
        else:
            self._bury(flight, pipeline)

    def _again(self, flight: Flight, wait: float, pipeline: Any, **changes: int) -> None:
        before = {name: getattr(flight.job, name) for name in changes}
        vars(flight.job).update(changes)
        self._leave_flight(flight, pipeline)
        if wait:
            self.queues[0].schedule_job(flight.job, now() + timedelta(seconds=wait), pipeline=pipeline)
        else:
            self.queues[0]._enqueue_job(flight.job, pipeline=pipeline)
        vars(flight.job).update(before)

    def _bury(self, flight: Flight, pipeline: Any) -> None:
        """To the dead letters; the verdict comes without this replay."""
        job = flight.job
        logger.error("job %s fell for good: %s", job.id, flight.why)
        outcome = pack_outcomes([ReplayError(f"{FAILED}: {flight.why}")])
        self._stages.answer(response_of(job.id), outcome, job.meta, pipeline, second=flight.second)
        self._leave_flight(flight, pipeline)
        job.set_status(JobStatus.FAILED, pipeline=pipeline)
        job._handle_failure(flight.why, pipeline=pipeline, worker_name=self.name)

    def _leave_flight(self, flight: Flight, pipeline: Any) -> None:
        self.cleanup_execution(flight.job, pipeline=pipeline, execution=flight.execution)

    def _give_up(self, job_id: str, reason: str) -> None:
        kind = reason.partition(": ")[2] or reason
        self._stages.give_up(response_of(job_id), f"{FAILED}: {kind}", second=is_second(job_id))
