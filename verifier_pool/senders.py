"""Further loops on the queue of webhooks, in threads: receivers that stall or are slow hold up half of them at most."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from redis import Redis
from redis.exceptions import RedisError
from rq.timeouts import BaseDeathPenalty

from verifier_pool import webhooks
from verifier_pool.link.queue import WEBHOOK_QUEUE
from verifier_pool.loop import Loop

logger = logging.getLogger(__name__)

_ENDS_WITHIN = 40.0
"""Seconds in which a delivery at hand ends, by its own time-outs."""


class _NoDeathPenalty(BaseDeathPenalty):
    """Signals reach the main thread alone, and a delivery ends by itself; else the watchdog ends the process."""

    def setup_death_penalty(self) -> None:
        """Nothing."""

    def cancel_death_penalty(self) -> None:
        """Nothing."""


class Sender(Loop):
    """One of them. It runs jobs; what is to be done between jobs another loop of the process does."""

    death_penalty_class = _NoDeathPenalty


@contextlib.contextmanager
def senders(redis: Redis, count: int) -> Iterator[None]:
    """So many more loops run meanwhile; whatever goes wrong with one, it begins anew. At the end each finishes what it
    has at hand."""
    ended = threading.Event()
    threads = [
        threading.Thread(target=_send, args=(redis, ended), name=f"sender-{number}", daemon=True)
        for number in range(count)
    ]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        ended.set()
        for each in threads:
            each.join(_ENDS_WITHIN)


def _send(redis: Redis, ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            Sender(WEBHOOK_QUEUE, redis, ended, on_failed=webhooks.dead_letter).serve()
        except RedisError as error:
            logger.warning("a sender lost Redis: %s", type(error).__name__)
            ended.wait(1.0)
        except Exception:
            # One thread that is gone is not missed until it is the last.
            logger.exception("a sender failed and goes on")
            ended.wait(1.0)
