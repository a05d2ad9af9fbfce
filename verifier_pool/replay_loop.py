"""One process, or thread, that drains the queue of one reference with hundreds of replays in flight at once.

The state machine of a job stays rq's. What rq does per job is done per batch here: taking, beginning, heartbeats and
ending are a round trip or two each, however many jobs that concerns. It writes no verdict and reads no evidence.

A job that was in flight when the process or the engine died runs alone next time, so that evidence which kills its
reference takes nothing else down twice, and ends among the dead letters after its tries. While nothing succeeds, the
loop takes one job at a time and waits between them: not every job's tries are to be spent on a reference that is down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from redis.exceptions import RedisError

from policies.errors import ReplayError
from policies.evidence import Replay
from policies.settings import ReferenceSettings
from verifier_pool import metrics
from verifier_pool.caretaker import Caretaker
from verifier_pool.flights import Flight, read_flights
from verifier_pool.flying import BATCH, Flying
from verifier_pool.reference.base import Reference, ReplayRequest
from verifier_pool.replay_endings import ReplayEndings
from verifier_pool.replays import queue_of
from verifier_pool.stages import Stages
from verifier_pool.traced import replayed
from verifier_pool.troubles import Troubles

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 20.0
"""How long a loop that was told to stop tries to store what it holds in a Redis that does not answer."""


class ReplayLoop(ReplayEndings):
    """Takes replays of one model until `stop` is set; those in flight then are finished first.

    Args:
        stages: over the Redis that it works on.
        limits: how much the reference may hold at once.
    """

    poll = 0.01

    def __init__(
        self,
        model: str,
        reference: Reference,
        stages: Stages,
        stop: threading.Event,
        *,
        limits: ReferenceSettings,
        second: bool = False,
        on_tick: Callable[[], object] | None = None,
    ) -> None:
        name = queue_of(model, second=second)
        super().__init__(name, stages, stop, on_tick=on_tick)
        self._model = model
        self._reference = reference
        self._care = Caretaker(f"{model}:second" if second else model, reference, stages, stop)
        self._limits = limits
        self._flying = Flying()
        self._hand: list[str] = []
        self._alone = False
        self._troubles = Troubles()
        self._counted = metrics.Reference(model, second=second)

    def serve(self, burst: bool = False) -> int:
        """Work; returns how many jobs ended, or were queued for what a canary said.

        With `burst` it ends when none waits, is due or in flight.

        Raises:
            RedisError: Redis went away while nothing was in flight, or with `burst`, or for long after `stop`.
        """
        done, next_tick, gone = -self._care.freed, 0.0, float("inf")
        with self._present():
            while True:
                self._came_around = time.monotonic()
                try:
                    if gone < float("inf"):
                        self._beat()  # before anybody's upkeep takes what is in flight for abandoned
                        gone = float("inf")
                    if time.monotonic() >= next_tick:
                        self._tick()
                        self._end_late_ones()
                        self._count()
                        self._care.look(burst=burst)
                        next_tick = time.monotonic() + 1
                    done += self._land()
                    if self._care.wanted:
                        self._send_canary()
                    taken = 0 if self._stop.is_set() else self._launch(0.0 if burst else 1.0)
                except RedisError as error:
                    gone = min(gone, time.monotonic())
                    if (
                        burst
                        or not self._flying
                        or (self._stop.is_set() and time.monotonic() > gone + LAST_WORDS_SECONDS)
                    ):
                        raise
                    logger.warning("Redis does not answer (%s); replays wait for it", type(error).__name__)
                    self._hang_up()
                    time.sleep(0.5)
                    continue
                if taken:
                    continue
                if not self._flying and (self._stop.is_set() or (burst and self._nothing_left())):
                    self._care.look(burst=burst)
                    if not self._care.patient():
                        if not burst:
                            self._care.leave()
                        return done + self._care.freed
                self._wait()

    # Taking jobs

    def _launch(self, patience: float) -> int:
        """Take what there is room for and hand it to the reference; returns how many jobs that were."""
        if not self._hand:
            room = self._room()
            if room <= 0:
                return 0
            self._hand = self.queues[0].take(  # type: ignore[attr-defined]
                room,
                tokens=max(self._limits.max_in_flight_tokens - self._flying.tokens, 0),
                alone=not self._flying,
                wait=0.0 if self._flying or self._care.wanted else patience,
            )
        if not self._hand:
            return 0
        flights, unreadable = read_flights(self.connection, self._hand, self._stages.sealer)
        for id in unreadable:
            logger.error("job %s cannot be read; dropped", id)
            self._give_up(id, "job_unreadable")
            self.queues[0].intermediate_queue.remove(id)
        flights, back = self._sorted_out(flights)
        queue = self.queues[0]
        with self.connection.pipeline() as pipeline:
            for flight in flights:
                flight.execution = self._begin(flight.job, pipeline)
            for flight in reversed(back):
                pipeline.lrem(queue.intermediate_queue_key, 1, flight.job.id)
                queue.push_job_id(flight.job.id, pipeline=pipeline, at_front=True)
            pipeline.execute()
        self._hand = []
        for flight in flights:
            metrics.taken(metrics.stage_of(flight.job.meta), flight.job.enqueued_at, self._counted.model)
        for flight in sorted(flights, key=lambda flight: -flight.tokens):
            flight.patience = max(flight.job.timeout or 0, 0) or flight.patience
            flight.instance = self._care.instance
            self._flying.add(flight)
            flight.begin(self._submit, self._flying.lands)
        self._send_canary()
        self._count()
        return len(flights) + len(back)

    def _room(self) -> int:
        """How many jobs may be taken now."""
        if self._troubles.wait or (self._alone and self._flying):
            return 0
        if self._alone or self._troubles:
            return 0 if self._flying else 1
        return min(self._limits.max_in_flight - len(self._flying), BATCH)

    def _sorted_out(self, flights: Sequence[Flight]) -> tuple[list[Flight], list[Flight]]:
        """Those to begin now, and those that go back to the front of the queue, because each has to run alone."""
        fell = [flight for flight in flights if flight.fell_before and not flight.failure]
        calm = [flight for flight in flights if flight not in fell]
        self._alone = bool(fell)
        return (calm, fell) if calm or self._flying else (fell[:1], fell[1:])

    def _submit(self, request: ReplayRequest) -> Future[Replay]:
        longest = self._reference.max_tokens
        if longest is not None and request.tokens > longest:
            raise ReplayError("too_long")
        return self._reference.submit(request)

    def _send_canary(self) -> None:
        if self._alone and self._flying:
            return
        flight = self._care.canary(flying=bool(self._flying))
        if flight is not None:
            self._flying.add(flight)
            flight.begin(self._reference.submit, self._flying.lands)

    # What lands

    def _wait(self) -> None:
        """Until something lands; not for long, because new jobs do not land."""
        if self._flying.landed:
            return
        if self._flying:
            self._flying.collect(self.poll)
        elif self._troubles.wait:
            self._stop.wait(min(0.1, self._troubles.wait))
        elif self._care.wanted:
            time.sleep(self.poll)

    def _land(self) -> int:
        """Store what came of replays that ended, of some at least; returns how many jobs that were."""
        self._flying.collect()
        self._judge_canaries()
        if self._care.unsound:
            self._distrust()
        batch = self._flying.batch(self._care.stamp)
        if not batch:
            return 0
        with self.connection.pipeline() as pipeline:
            for flight, fate in batch:
                self._end_alone(flight, fate, pipeline)
            pipeline.hincrby(self.key, "successful_job_count", len(batch))
            pipeline.execute()
        replayed(batch, self._model, self._reference.name, len(self._flying))
        self._over([flight for flight, _ in batch])
        self._counted.landed(batch)
        self._count()
        return len(batch)

    def _count(self) -> None:
        self._counted.holds(len(self._flying), self._flying.tokens)

    def _over(self, flights: Sequence[Flight]) -> None:
        self._flying.remove(flights)
        self._troubles.note(flights)
        self._counted.stands(still=self._troubles.still)

    # Sick references

    def _judge_canaries(self) -> None:
        for flight in [flight for flight in self._flying.landed if flight.is_canary]:
            flight.settle(0)
            self._over([flight])
            self._care.judge(flight)

    def _distrust(self) -> None:
        """A canary came back wrong: nothing that is in flight, or just landed, counts; the reference starts anew."""
        self._care.distrust()
        flights = [flight for flight in self._flying if not flight.is_canary]
        with self.connection.pipeline() as pipeline:
            for flight in flights:
                self._again(flight, 0, pipeline)
            pipeline.execute()
        for flight in self._flying:
            flight.cancel()
        self._flying.remove(list(self._flying))
        self._restart()

    def _end_late_ones(self) -> None:
        """What is over its time falls; where nothing succeeded for so long, the reference hangs and starts again."""
        hangs = False
        for flight, stuck in self._flying.late(self._troubles.last_success):
            logger.error("%s is over its time", "a canary" if flight.is_canary else f"job {flight.job.id}")
            flight.cancel(TimeoutError())
            self._flying.lands(flight)
            hangs = hangs or stuck
        if hangs:
            self._restart()

    def _restart(self) -> None:
        self._came_around = None
        self._care.restart()
        self._came_around = time.monotonic()

    # Staying alive

    def _nothing_left(self) -> bool:
        """Whether nothing waits or is due."""
        if self._troubles.wait:
            return False
        self._release_due()
        return not self.queues[0].count

    def _beat(self) -> None:
        registry = self.queues[0].started_job_registry
        with self.connection.pipeline(transaction=False) as pipeline:
            self.heartbeat(pipeline=pipeline)
            for flight in self._flying:
                if not flight.is_canary:
                    flight.execution.heartbeat(registry, self.patience, pipeline=pipeline)
            pipeline.execute()
