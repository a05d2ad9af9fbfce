"""rq's job and queue as we use them: what may run, what is kept of a failure, and what a damaged record may do."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Any

from rq.intermediate_queue import IntermediateQueue
from rq.job import Job, JobStatus
from rq.utils import now

from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import VERIFY_JOB, WEBHOOK_JOB
from verifier_pool.replays import REPLAY_JOB

MAINTENANCE_LOCK_SECONDS = 20
"""How long a worker that dies at its upkeep keeps the others from it; the upkeep itself takes milliseconds."""
STRANDED_SECONDS = 15
"""How long a job may be taken and not begun, once that was noticed. One follows the other within milliseconds."""
REMEMBERED_SECONDS = 8 * STRANDED_SECONDS
"""How long the time at which that was noticed is kept."""
ALLOWED = frozenset({VERIFY_JOB, WEBHOOK_JOB, REPLAY_JOB})


def place_of(kind: type[BaseException], trace: TracebackType | None) -> str:
    """Type of an exception and where it came from, without its message: an engine's may quote the prompt."""
    frames = traceback.extract_tb(trace)
    return "\n".join([kind.__name__, *(f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)])


def _sound(name: str, value: object) -> bool:
    if name in ("lane", "tokens", "size"):
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
    return isinstance(value, str)


class RefusedJob(Exception):
    """Somebody queued a function that is not ours."""


class OurJob(Job):
    """A job that runs our functions only: whoever can write to Redis must not be able to run code here.

    `held` is in how many seconds a job comes again that failed through no fault of its own (`standstill`).
    """

    held = 0

    def restore(self, raw_data: Any) -> None:
        """As rq's; what is damaged in `meta` counts as missing: whoever reads it expects what `fair` wrote."""
        super().restore(raw_data)
        meta = self.meta if isinstance(self.meta, dict) else {}
        self.meta = {name: value for name, value in meta.items() if _sound(name, value)}

    @property
    def func(self) -> Any:
        if self.func_name not in ALLOWED or self.instance is not None:
            self.retries_left = 0
            raise RefusedJob("the function is not on the allow-list")
        return super().func

    def set_status(self, status: JobStatus, pipeline: Any = None) -> None:
        """In one step with the list or registry that it stands for, never alone.

        rq writes that a retry is scheduled before it schedules it, and whoever dies in between would leave a job that
        is said to wait and waits nowhere. What schedules it writes its status too.
        """
        if pipeline is None:
            self._status = status
        else:
            super().set_status(status, pipeline)

    def get_retry_interval(self) -> int:
        return self.held or super().get_retry_interval()

    success_callback = failure_callback = stopped_callback = property(lambda self: None)

    def send_webhooks(self, *args: Any, **kwargs: Any) -> None:
        """rq's own webhooks know neither signatures nor an address guard."""


class _Taken(IntermediateQueue):
    """What was taken and is not begun; rq gives it a minute."""

    def set_first_seen(self, job_id: str) -> bool:
        # rq remembers it for a day, and would take a retry for stranded that is just being begun.
        key = self.get_first_seen_key(job_id)
        return bool(self.connection.set(key, now().timestamp(), nx=True, ex=REMEMBERED_SECONDS))

    def remove(self, job_id: str) -> None:
        super().remove(job_id)
        self.connection.delete(self.get_first_seen_key(job_id))

    def should_be_cleaned_up(self, job_id: str) -> bool:
        since = self.get_first_seen(job_id)
        return since is not None and (now() - since).total_seconds() > STRANDED_SECONDS


class OurQueue(FairQueue):
    """A queue whose upkeep is not blocked for a quarter of an hour by a worker that died doing it."""

    @property
    def intermediate_queue(self) -> IntermediateQueue:
        return _Taken(self.key, connection=self.connection)

    def acquire_maintenance_lock(self) -> bool:
        return bool(self.connection.set(self.registry_cleaning_key, 1, nx=True, ex=MAINTENANCE_LOCK_SECONDS))
