"""What is in our queues, in two round trips and without a command that grows with what waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from redis import Redis
from rq.job import Job
from rq.utils import utcparse
from rq.worker_registration import WORKERS_BY_QUEUE_KEY

from verifier_pool.link.fair import LANES, FairQueue

OURS = "countersign-"
"""How the names of our queues begin."""
_LANES = ("first", *LANES)


@dataclass(frozen=True, slots=True)
class State:
    """One queue at one moment.

    Attributes:
        lanes: jobs that wait, by lane; those that rq itself pushed under `first`.
        running: jobs that a worker has taken. `later`: that are tried again later. `dead`: that failed for good.
        oldest: seconds for which the oldest has waited; None where none does.
        workers: processes that take its jobs.
    """

    lanes: dict[str, int]
    running: int
    later: int
    dead: int
    oldest: float | None
    workers: int

    @property
    def waiting(self) -> int:
        """Jobs that wait."""
        return sum(self.lanes.values())


def queues(redis: Redis) -> list[FairQueue]:
    """All our queues that ever had a job, by name."""
    keys = cast("set[bytes]", redis.smembers(FairQueue.redis_queues_keys))
    names = sorted(key.decode(errors="replace").rpartition(":queue:")[2] for key in keys)
    return [FairQueue(name, connection=redis) for name in names if name.startswith(OURS)]


def states(redis: Redis, queues: Sequence[FairQueue], now: float) -> list[State]:
    """How each of these queues is; `now` in Unix seconds."""
    if not queues:
        return []
    pipeline = redis.pipeline(transaction=False)
    for queue in queues:
        _ask(pipeline, queue)
    said = pipeline.execute()
    width = len(said) // len(queues)
    found = [_told(said[at * width : (at + 1) * width]) for at in range(len(queues))]
    pipeline = redis.pipeline(transaction=False)
    for _, heads, _, workers in found:
        for id in heads:
            pipeline.hget(Job.key_for(id.decode(errors="replace")), "enqueued_at")
        for key in workers:
            pipeline.exists(key)
    answers = iter(pipeline.execute())
    made = []
    for (*counts, running, taken, later, dead), heads, since, workers in found:
        begun = [seconds(next(answers)) for _ in heads] + [None if since is None else float(since)]
        known = [at for at in begun if at is not None]
        oldest = max(0.0, round(now - min(known), 3)) if known and sum(counts) else None
        here = sum(next(answers) for _ in workers)
        made.append(State(dict(zip(_LANES, counts, strict=True)), running + taken, later, dead, oldest, here))
    return made


def described(redis: Redis, now: float) -> list[dict[str, Any]]:
    """All our queues as JSON has words for them."""
    found = queues(redis)
    return [
        {
            "queue": queue.name,
            "waiting": state.waiting,
            "lanes": state.lanes,
            "in_flight": state.running,
            "later": state.later,
            "dead": state.dead,
            "oldest_seconds": state.oldest,
            "workers": state.workers,
        }
        for queue, state in zip(found, states(redis, found, now), strict=True)
    ]


def seconds(value: bytes | None) -> float | None:
    """Unix second of a moment as rq writes it; None where there is none."""
    try:
        return None if value is None else utcparse(value.decode()).timestamp()
    except ValueError:
        return None


def _ask(pipeline: Any, queue: FairQueue) -> None:
    pipeline.llen(queue.key)
    for key in queue.lane_keys:
        pipeline.zcard(key)
    pipeline.zcard(queue.started_job_registry.key)
    pipeline.llen(queue.intermediate_queue_key)
    pipeline.zcard(queue.scheduled_job_registry.key)
    pipeline.zcard(queue.failed_job_registry.key)
    pipeline.smembers(WORKERS_BY_QUEUE_KEY % queue.name)
    queue.ask_oldest(pipeline)
    pipeline.lindex(queue.key, 0)
    pipeline.lindex(queue.key, -1)


def _told(answers: Sequence[Any]) -> tuple[list[int], list[bytes], bytes | None, Sequence[bytes]]:
    """What `_ask` asked for: counts, ids that rq pushed and that may be older than those of lanes, since when the
    oldest of these waits, and who works."""
    *counts, workers, since, first, last = answers
    return counts, [id for id in (first, last) if id is not None], since, list(workers)
