"""A queue of rq whose order is fair between tenants, and puts what somebody waits for first.

Beside rq's list, which holds whatever rq itself pushes (such as a job whose worker died) and goes first, a queue has
one sorted set per lane. Lanes go in their order, except that every eighth job comes from the lower ones, in turn. In a
lane tenants take turns by start-time fair queueing (Goyal, Vin & Cheng, 1996): a job starts, in the lane's virtual
time, where its tenant's last one ended, and ends its cost later; the job with the earliest start is next. While two
tenants both wait, what they are served differs by no more than one job of each, whatever they send.

Taken ids go to rq's intermediate list, from where rq's upkeep brings back those of a worker that died. Every script
takes O(log n) per job. A lane that runs empty forgets its tenants, and before that those whose turn is no later than
anybody's.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Literal, cast

from redis import Redis
from rq import Queue, Retry
from rq.exceptions import DequeueTimeout
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.utils import as_text

from policies.settings import VerificationSettings
from verifier_pool import RQ_PREFIX
from verifier_pool.link.fair_scripts import EMPTY, OLDEST, PUSH, REMOVE, TAKE
from verifier_pool.link.queue import RETRY_SECONDS

LANES = ("inline-judge", "inline", "async-judge", "async")
"""First what has its replay already, as that was paid for; each for clients that wait, then for those that do not."""
Stage = Literal["verify", "replay", "judge", "judge_vouched", "replay2", "judge2", "judge2_vouched"]
SUFFIXES: dict[Stage, str] = {
    "verify": "",
    "replay": "-r",
    "judge": "-j",
    "judge_vouched": "-v",
    "replay2": "-r2",
    "judge2": "-j2",
    "judge2_vouched": "-v2",
}
"""What the id of a stage's job adds to the generation's."""


def options(
    id: str,
    settings: VerificationSettings,
    *,
    inline: bool,
    tenant: str,
    tokens: int,
    size: int,
    stage: Stage = "verify",
) -> dict[str, Any]:
    """Keyword arguments of `FairQueue.enqueue(JOB, id, **options(id, …))`, every lifetime explicit.

    Args:
        id: the generation's.
        inline: a client waits for the verdict.
        tenant: whose turn it takes, the owner of the generation.
        tokens: what it costs: of the prompt and of all answers.
        size: bytes in Redis that wait for it.
        stage: one of the steps to the verdict; the job's id is the generation's and the stage's suffix.
    """
    lane = LANES.index(("inline" if inline else "async") + ("-judge" if stage.startswith("judge") else "")) + 1
    return {
        "job_id": id + SUFFIXES[stage],
        "description": f"{stage} {id}",
        "job_timeout": settings.job_timeout,
        "ttl": settings.evidence_ttl,
        "result_ttl": 0,
        "failure_ttl": settings.verdict_ttl,
        "retry": Retry(max=len(RETRY_SECONDS), interval=list(RETRY_SECONDS)),
        "meta": {"lane": lane, "tenant": tenant, "tokens": max(int(tokens), 1), "size": int(size), "stage": stage},
    }


class FairQueue(Queue):
    """An rq queue in the order of this module; jobs need the `meta` of `options`, else they go first.

    rq's own workers can drain it one by one (`dequeue_any`). A retry keeps its lane, starts at once there and is not
    charged again.
    """

    def __init__(self, name: str, connection: Redis, serializer: Any = JSONSerializer, **more: Any) -> None:
        super().__init__(name, connection=connection, serializer=serializer, **more)
        keys = [f"{self.key}:lane{lane}" for lane in (1, 2, 3, 4)]
        self.lane_keys = keys
        self._own = [
            *keys,
            *(f"{key}:ends" for key in keys),
            f"{self.key}:state",
            f"{self.key}:bell",
            self.since_key,
        ]

    @property
    def since_key(self) -> str:
        """Key of the sorted set of ids of what waits in a lane, by the Unix second since when."""
        return f"{self.key}:since"

    def take(self, n: int, *, tokens: int | None = None, alone: bool = True, wait: float = 0) -> list[str]:
        """Ids of up to `n` next jobs, which are now in the intermediate list.

        Args:
            tokens: what they may cost together; the first one that costs more waits until it fits.
            alone: the first one may cost more than that (and nothing then comes with it).
            wait: seconds to wait for a job when there is none; fractions count.
        """
        deadline = time.monotonic() + wait
        while True:
            ending, ids = self._move(n, tokens, alone)
            left = deadline - time.monotonic()
            if ids or ending == "full" or left <= 0:
                return ids
            self.connection.blpop([f"{self.key}:bell"], timeout=max(left, 0.01))

    def waiting(self) -> dict[str, int]:
        """How many jobs wait, by lane; those that rq itself pushed under `first`."""
        pipeline = self.connection.pipeline(transaction=False)
        pipeline.llen(self.key)
        for key in self.lane_keys:
            pipeline.zcard(key)
        return dict(zip(("first", *LANES), pipeline.execute(), strict=True))

    @property
    def count(self) -> int:
        """How many jobs wait."""
        return sum(self.waiting().values())

    def ask_oldest(self, pipeline: Any) -> None:
        """Have `pipeline` tell since when the oldest job of the lanes waits (Unix seconds as text), or None."""
        self._eval(pipeline, OLDEST, [*self.lane_keys, self.since_key], [])

    def get_job_ids(self, offset: int = 0, length: int = -1) -> list[str]:
        """Ids of what waits: rq's own, then lane by lane, the soonest first."""
        pipeline = self.connection.pipeline(transaction=False)
        pipeline.lrange(self.key, 0, -1)
        for key in self.lane_keys:
            pipeline.zrange(key, 0, -1)
        ids = [as_text(id) for part in pipeline.execute() for id in part]
        return ids[offset:] if length < 0 else ids[offset : offset + length]

    def get_job_position(self, job_or_id: Job | str) -> int | None:
        """Where a job is in `get_job_ids`; None when it does not wait."""
        ids = self.get_job_ids()
        id = job_or_id.id if isinstance(job_or_id, Job) else job_or_id
        return ids.index(id) if id in ids else None

    def remove(self, job_or_id: Job | str, pipeline: Any = None) -> Any:
        """Take a job off the queue; the number of places it had, or the pipeline it is put in."""
        id = job_or_id.id if isinstance(job_or_id, Job) else job_or_id
        client = pipeline if pipeline is not None else self.connection
        return self._eval(client, REMOVE, [*self._own, self.key], [id])

    def empty(self) -> int:
        """Delete everything that waits; returns how many jobs that were."""
        listed = int(super().empty())  # type: ignore[no-untyped-call]
        prefixes = [self.job_class.redis_job_namespace_prefix, f"{RQ_PREFIX}:results:"]
        return listed + int(self._eval(self.connection, EMPTY, self._own, prefixes))

    def delete(self, delete_jobs: bool = True) -> None:
        """Delete the queue, and what waits in it."""
        super().delete(delete_jobs)
        self.connection.delete(*self._own)

    def compact(self) -> None:
        """Drop what waits but no longer exists."""
        for id in self.get_job_ids():
            if not self.job_class.exists(id, self.connection):
                self.remove(id)

    def push_job_id(self, job_id: str, pipeline: Any = None, at_front: bool = False) -> None:
        """Queue a job before all others."""
        super().push_job_id(job_id, pipeline=pipeline, at_front=at_front)
        client = pipeline if pipeline is not None else self.connection
        client.rpush(f"{self.key}:bell", "")
        client.ltrim(f"{self.key}:bell", 0, 63)

    def pop_job_id(self) -> str | None:
        """The next id, which is then on no list."""
        ids = self.take(1)
        for id in ids:
            self.intermediate_queue.remove(id)
        return ids[0] if ids else None

    @classmethod
    def lmove(cls, connection: Redis, queue_key: str, timeout: int | None) -> tuple[str, str] | None:
        """As rq's: the key and the next id. Raises DequeueTimeout where a time-out was given and it is over."""
        queue = cast(FairQueue, cls.from_queue_key(queue_key, connection=connection))
        ids = queue.take(1, wait=timeout or 0)
        if ids:
            return queue_key, ids[0]
        if timeout is None:
            return None
        raise DequeueTimeout(timeout, queue_key)

    def _enqueue_async_job(self, job: Job, pipeline: Any = None, at_front: bool = False, unique: bool = False) -> Job:
        lane = (job.meta or {}).get("lane")
        if at_front or unique or lane not in range(1, len(LANES) + 1):
            return super()._enqueue_async_job(job, pipeline=pipeline, at_front=at_front, unique=unique)
        cost = 0 if job.started_at else max(int(job.meta.get("tokens", 1)), 1)
        self._prepare_for_queue(job)
        with contextlib.ExitStack() as stack:
            pipe = pipeline if pipeline is not None else stack.enter_context(self.connection.pipeline())
            self._persist_job(job, pipe)
            self._eval(pipe, PUSH, self._own, [job.id, lane, str(job.meta.get("tenant", "")), cost])
            if pipeline is None:
                pipe.execute()
        return job

    def _move(self, n: int, tokens: int | None, alone: bool) -> tuple[str, list[str]]:
        keys = [*self._own, self.key, self.intermediate_queue_key]
        arguments = [n, self.job_class.redis_job_namespace_prefix, -1 if tokens is None else max(tokens, 0), int(alone)]
        ids: list[str] = []
        ending = "again"
        while ending == "again" and not ids:
            ending, *ids = [as_text(each) for each in self._eval(self.connection, TAKE, keys, arguments)]
        return ending, ids

    @staticmethod
    def _eval(client: Any, script: str, keys: list[str], arguments: list[Any]) -> Any:
        # The whole script each time: in a transaction its hash alone would fail where a fail-over lost the script.
        return client.eval(script, len(keys), *keys, *arguments)
