"""Whose fault it is that a job failed: its own, or that of the process that ran it.

A verdict is written once, so a worker that can do nothing right (a library that is gone, a disk that is full, a release
with a bug) must not end a whole backlog as `job_failed`. What is not the job's doing costs it no try: it is held for a
while and comes again, here or elsewhere, as long as its evidence lives.
"""

from __future__ import annotations

import logging
import time

from redis.exceptions import RedisError

from policies.errors import EvidenceError, OtherVersion, SettingsError, StoreUnavailable
from verifier_pool import metrics
from verifier_pool.link.connection import about_one_key
from verifier_pool.rq_job import RefusedJob
from verifier_pool.troubles import TROUBLE_SECONDS

logger = logging.getLogger(__name__)

HOLD_SECONDS = 30
"""When a job comes again that failed through no fault of its own."""
SOON_SECONDS = 1
"""The same where Redis is the reason: the loop waits for Redis anyway."""
ALIKE = 3
"""Different jobs that must have failed, and none succeeded since the first, before that is the process's own doing."""
ALIKE_SECONDS = 5.0
"""For how long nothing must have succeeded, besides. Answers made to break a check hold up nothing while others pass,
and the quick tries of a job (`queue.RETRY_SECONDS`) last longer than this."""

_THEIRS = (EvidenceError, RefusedJob)
_OURS = (ImportError, OSError, SettingsError, StoreUnavailable)


class Standstill:
    """What the jobs of one process came to, of late. It outlives loops, which end with every outage of Redis.

    `countersign.worker.standstill` shows it.
    """

    def __init__(self) -> None:
        metrics.stands("verify", still=False)
        self._failed: set[str] = set()
        self._since = 0.0
        self._waits = 0
        self._not_before = 0.0

    @property
    def wait(self) -> float:
        """Seconds in which no job is to be taken: what nothing succeeds in would only fail more of them."""
        return max(self._not_before - time.monotonic(), 0.0)

    def succeeded(self) -> None:
        """A job came to something."""
        if self._waits:
            logger.warning("jobs succeed again")
            metrics.stands("verify", still=False)
        self._failed.clear()
        self._waits, self._not_before = 0, 0.0

    def failed(self, id: str, error: BaseException) -> int:
        """Seconds for which this job is held, without a try being spent; 0 where it is the job's own fault.

        Args:
            id: of the job.
        """
        if isinstance(error, OtherVersion):
            return HOLD_SECONDS  # another worker may know it; this one gets on with others
        if isinstance(error, _THEIRS):
            return 0
        moment = time.monotonic()
        if not self._failed:
            self._since = moment
        if len(self._failed) < ALIKE:
            self._failed.add(id)
        alike = len(self._failed) == ALIKE and moment - self._since >= ALIKE_SECONDS
        if not (alike or _ours(error)):
            return 0
        metrics.stands("verify", still=True)
        if not self.wait:
            logger.critical("nothing succeeds here (%s); what is queued waits", type(error).__name__)
            self._not_before = moment + TROUBLE_SECONDS[min(self._waits, len(TROUBLE_SECONDS) - 1)]
            self._waits += 1
        return SOON_SECONDS if isinstance(error, RedisError) else HOLD_SECONDS


def _ours(error: BaseException) -> bool:
    """Whether no evidence in the world raises such an error."""
    return isinstance(error, _OURS) or (isinstance(error, RedisError) and not about_one_key(error))
