"""A pool at work in the background, with a reference that answers when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from redis import Redis
from rq.timeouts import TimerDeathPenalty

from policies.errors import ReplayError
from policies.evidence import Replay
from policies.settings import Settings
from tests.support.waiting import PATIENCE
from tests.verifier_pool import rig
from tests.verifier_pool.toy import ToyReference, answer, settings
from verifier_pool.link.fair import FairQueue
from verifier_pool.reference.base import ReplayRequest
from verifier_pool.replays import queue_of


class Told(ToyReference):
    """Holds what it is asked until `let` says how many may land; None is no limit."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[ReplayRequest, Future[Replay]]] = []
        self.most = 0
        self.restarts = 0
        self.failing: Callable[[ReplayRequest], str | None] = lambda _: None
        self._lock = threading.Lock()

    def submit(self, request: ReplayRequest) -> Future[Replay]:
        future: Future[Replay] = Future()
        with self._lock:
            self.seen.append(request)
            self.held.append((request, future))
            self.most = max(self.most, len(self.held))
        return future

    def let(self, count: int | None = None) -> int:
        with self._lock:
            landing, self.held = self.held[:count], [] if count is None else self.held[count:]
        for request, future in landing:
            reason = self.failing(request)
            if not future.set_running_or_notify_cancel():
                continue
            if reason is None:
                future.set_result(ToyReference().replay([request])[0])
            else:
                future.set_exception(ReplayError(reason))
        return len(landing)

    def restart(self) -> None:
        self.restarts += 1
        self.failing = lambda _: None


class Running:
    """A pool at work in the background."""

    def __init__(self, redis: Redis, rules: Settings, reference: ToyReference, **limits: Any) -> None:
        self.stop = threading.Event()
        self.pool = rig.worker(redis, rules, {"toy": reference}, self.stop, **limits)
        # Alarms go to the main thread only.
        self.pool.loop.death_penalty_class = TimerDeathPenalty
        self.thread = threading.Thread(target=self.pool.serve)
        self.thread.start()
        self._reference = reference

    def end(self) -> None:
        self.stop.set()
        while isinstance(self._reference, Told) and self.thread.is_alive():
            self._reference.let()
            self.thread.join(0.1)
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


def submit(redis: Redis, url: str, count: int, **changes: Any) -> list[str]:
    return [rig.submit(redis, settings(url), [answer(**changes)]) for _ in range(count)]


def letters(redis: Redis) -> list[str]:
    return list(FairQueue(queue_of("toy"), connection=redis).failed_job_registry.get_job_ids())
