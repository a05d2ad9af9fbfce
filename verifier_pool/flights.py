"""One job of a replay loop in flight: its futures, and what became of it (all of them: `verifier_pool.flying`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Any

from redis import Redis
from rq.exceptions import NoSuchJobError
from rq.executions import Execution
from rq.job import Job
from rq.serializers import JSONSerializer

from policies.errors import NoSealingKey, ReplayError, SealError
from policies.evidence import Replay
from verifier_pool.link.queue import RETRY_SECONDS
from verifier_pool.link.sealing import Sealer
from verifier_pool.packing import pack_outcomes, unpack_requests
from verifier_pool.reference.base import ReplayRequest
from verifier_pool.replays import FINAL_REASONS, REPLAY_JOB, UNREADABLE, Stamp, is_second, request_key, response_of
from verifier_pool.rq_job import OurJob, RefusedJob

ENGINE_FAILED = "engine_failed"
NO_KEY = "no_sealing_key"
SETTLED = FINAL_REASONS | {UNREADABLE}
"""Reasons that no other try can change."""


class Fate(Enum):
    """What becomes of a job whose replays ended: it is done, is tried again, or fell: its engine died over it, hangs or
    broke, or it is not ours."""

    DONE = "done"
    AGAIN = "again"
    FELL = "fell"


class Flight:
    """One job with the replays of its response's choices; or a canary, which has no job.

    Attributes:
        requests: what the reference is asked; empty once it was.
        outcomes: what came of each, once all ended.
        failure: what went wrong beyond a ReplayError.
        void: there is nothing (left) to do.
        packed: the outcomes as they are stored, once it is done.
        tokens: that the reference holds for it.
        instance: of the reference that it was handed to, or an earlier one (`verifier_pool.vouching`).
        number: of a canary, in the order in which they are sent.
        began: seconds of the monotonic clock. `patience`: seconds that it may take while nothing else succeeds.
    """

    def __init__(self, job: Job | None, *, second: bool = False) -> None:
        self._job = job
        self.second = second
        self._execution: Execution | None = None
        self.requests: list[ReplayRequest] = []
        self.outcomes: list[Replay | ReplayError] = []
        self.failure: BaseException | None = None
        self.void = False
        self.tokens = 0
        self.began = time.monotonic()
        self.patience = 300.0
        self._futures: list[Future[Replay]] = []
        self.packed = b""
        self.instance = ""
        self.number = 0

    @property
    def job(self) -> Job:
        """The job; a canary has none."""
        assert self._job is not None
        return self._job

    @property
    def execution(self) -> Execution:
        """What rq keeps of it while it runs; a canary has none."""
        assert self._execution is not None
        return self._execution

    @execution.setter
    def execution(self, execution: Execution) -> None:
        self._execution = execution

    @property
    def is_canary(self) -> bool:
        """Whether this is no job at all."""
        return self._job is None

    @property
    def fell_before(self) -> bool:
        """Whether a process or an engine died, or a bug struck, while this was in flight."""
        left = self.job.retries_left
        return left is not None and left < len(RETRY_SECONDS)

    def begin(self, submit: Callable[[ReplayRequest], Future[Replay]], landed: Callable[[Flight], object]) -> None:
        """Hand the requests to a reference. `landed` is called, from any thread, at least once after all ended."""
        self.began = time.monotonic()
        requests, self.requests = self.requests, []
        for request in requests:
            try:
                future = submit(request)
            except Exception as error:
                future = Future()
                future.set_exception(error)
            self._futures.append(future)
        if not self._futures:
            landed(self)
        for future in self._futures:
            future.add_done_callback(lambda _: landed(self))

    @property
    def ended(self) -> bool:
        """Whether all its replays ended."""
        return self.failure is not None or all(future.done() for future in self._futures)

    def cancel(self, why: BaseException | None = None) -> None:
        """Take it out of the reference; it fails for this reason."""
        self.failure = self.failure or why
        for future in self._futures:
            future.cancel()

    def settle(self, tries: int, stamp: Stamp | None = None) -> Fate:
        """What becomes of the job.

        Args:
            tries: how often a passing trouble is worth another try.
            stamp: who replayed it, and by now how many canaries were sent there.
        """
        for future in self._futures if self.failure is None else ():
            try:
                self.outcomes.append(future.result())
            except ReplayError as error:
                self.outcomes.append(error)
            except BaseException as error:
                # A cancelled future lands here too.
                self.failure = error
        self._futures = []
        reasons = {each.reason for each in self.outcomes if isinstance(each, ReplayError)}
        if self.failure is not None or ENGINE_FAILED in reasons:
            return Fate.FELL
        if reasons - SETTLED and not self.is_canary and (self.job.number_of_retries or 0) < tries:
            return Fate.AGAIN
        try:
            self.packed = pack_outcomes(self.outcomes, stamp)
        except Exception as error:
            self.failure = error
            return Fate.FELL
        return Fate.DONE

    @property
    def replays(self) -> list[Replay | None]:
        """What came of each request once it was settled; None for what failed."""
        return [each if isinstance(each, Replay) else None for each in self.outcomes]

    @property
    def troubled(self) -> bool:
        """Whether the reference, rather than the request, is the reason why something came to nothing."""
        reasons = {each.reason for each in self.outcomes if isinstance(each, ReplayError)}
        return self.failure is not None or bool(reasons - SETTLED)

    @property
    def why(self) -> str:
        """Type of what went wrong, without its message."""
        return ENGINE_FAILED if self.failure is None else type(self.failure).__name__


def read_flights(redis: Redis, ids: Sequence[str], sealer: Sealer) -> tuple[list[Flight], list[str]]:
    """The jobs of these ids with what each asks, in their order, and the ids of jobs that cannot be read."""
    pipeline = redis.pipeline(transaction=False)
    for id in ids:
        pipeline.hgetall(Job.key_for(id))
        pipeline.get(request_key(response_of(id), second=is_second(id)))
    found = iter(pipeline.execute())
    flights: list[Flight] = []
    unreadable: list[str] = []
    for id in ids:
        held, asked = next(found), next(found)
        try:
            flights.append(_flight(redis, id, held, asked, sealer))
        except Exception:
            unreadable.append(id)
    return flights, unreadable


def _flight(redis: Redis, id: str, held: dict[Any, Any], asked: bytes | None, sealer: Sealer) -> Flight:
    if not held:
        raise NoSuchJobError
    job = OurJob(id, connection=redis, serializer=JSONSerializer)
    job.restore(held)
    flight = Flight(job, second=is_second(id))
    if job.func_name != REPLAY_JOB:
        job.retries_left = 0
        flight.failure = RefusedJob("the function is not a replay")
    elif asked is None:
        flight.void = True  # another process did it, or the response has its verdict
    else:
        try:
            key = request_key(response_of(id), second=flight.second)
            flight.requests = unpack_requests(sealer.open(asked, key.encode()))
        except ReplayError as error:
            flight.outcomes = [error]
        except NoSealingKey:
            flight.outcomes = [ReplayError(NO_KEY)]  # another process may have it: this is tried again
        except SealError:
            flight.outcomes = [ReplayError(UNREADABLE)]
    flight.tokens = sum(request.tokens for request in flight.requests)
    return flight
