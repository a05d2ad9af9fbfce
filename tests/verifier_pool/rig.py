"""A worker in this process or in its own, on the toy model."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer
from rq.timeouts import TimerDeathPenalty

from policies import codec
from policies.evidence import Evidence
from policies.settings import ModelSettings, ReferenceSettings, Settings
from policies.verification import Verification
from tests.support.waiting import PATIENCE
from tests.support.waiting import wait_until as wait_until
from verifier_pool import caretaker, context, jobs, replay_endings, troubles
from verifier_pool.link import fair, queue
from verifier_pool.link.fair import options
from verifier_pool.link.queue import (
    OPEN,
    VERIFY_JOB,
    VERIFY_QUEUE,
    evidence_key,
    intent_key,
)
from verifier_pool.link.scripts import note_waiting
from verifier_pool.link.sealing import Sealer
from verifier_pool.loop import Loop
from verifier_pool.reference.base import Reference
from verifier_pool.replay_loop import ReplayLoop
from verifier_pool.stages import Stages
from verifier_pool.standstill import Standstill
from verifier_pool.store import Store

DECLARATION = {"model": "toy", "runtime": "", "precision": "", "engine": "", "speculative": ""}
"""What the settings of `toy` declare their backend to run."""

ROOT = Path(__file__).resolve().parents[2]


def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is tried again is tried at once."""
    for module in (replay_endings, fair, queue):
        monkeypatch.setattr(module, "RETRY_SECONDS", (0, 0, 0))
    monkeypatch.setattr(troubles, "TROUBLE_SECONDS", (0.0,))
    monkeypatch.setattr(caretaker, "RESTART_SECONDS", (0.01,))


def intent(redis: Redis, id: str, lost_at: float = 2**40) -> None:
    """What the proxy writes before a request goes up."""
    document = {"id": id, "owner": "0" * 64, "backend": "honest", "model": "toy", "created": time.time()}
    redis.set(intent_key(id), orjson.dumps(document | {"declaration": DECLARATION, "operator": False}))
    redis.zadd(OPEN, {id: lost_at})


def submit(redis: Redis, settings: Settings, choices: Sequence[Evidence], packed: bytes | None = None) -> str:
    """What the proxy does with a finished response; `packed` replaces the evidence."""
    id = choices[0].id
    intent(redis, id)
    key, data = evidence_key(id), codec.pack(choices) if packed is None else packed
    redis.set(key, Sealer.of(settings.storage).seal(data, key.encode()), ex=600)
    given = options(id, settings.verification, inline=False, tenant="o", tokens=1, size=0) | {"result_ttl": 60}
    given.pop("meta")  # so that it goes first, and rq's own queue shows it
    Queue(VERIFY_QUEUE, connection=redis, serializer=JSONSerializer).enqueue(VERIFY_JOB, id, **given)
    note_waiting(redis, id, choices[0].backend, time.time(), settings.verification.evidence_ttl)
    return id


def declaring(settings: Settings, *, first: bool = True, second: bool = False) -> Settings:
    """The settings with a reference of the toy model, and a second one."""
    reference = {"kind": "vllm_http", "url": "http://127.0.0.1:9"}
    known = settings.models.get("toy")
    tree = known.model_dump(exclude_unset=True) if known else {}
    tree |= {"reference": reference} if first else {}
    tree |= {"second_reference": reference, "second_profile": "unread"} if second else {}
    return settings.model_copy(update={"models": settings.models | {"toy": ModelSettings.model_validate(tree)}})


class Pool:
    """What one worker process does, in this process: verifications, and replays by each of these references."""

    def __init__(
        self,
        redis: Redis,
        settings: Settings,
        first: Reference | None = None,
        second: Reference | None = None,
        stop: threading.Event | None = None,
        **limits: Any,
    ) -> None:
        stop = stop or threading.Event()
        self.loop = Loop(VERIFY_QUEUE, redis, stop, on_failed=jobs.give_up, standstill=Standstill())
        stages = Stages(redis, settings.verification, Sealer.of(settings.storage))
        bounds = ReferenceSettings.model_validate({"kind": "vllm_http", "url": "http://127.0.0.1:9"} | limits)
        self.replaying = [
            ReplayLoop("toy", reference, stages, stop, limits=bounds, second=number == 1)
            for number, reference in enumerate((first, second))
            if reference is not None
        ]

    def serve(self, burst: bool = False) -> int:
        """Work until `stop`, or until nothing is left; returns how many jobs that were."""
        if burst:
            total = 0
            while done := sum(loop.serve(burst=True) for loop in (self.loop, *self.replaying)):
                total += done
            return total
        threads = [threading.Thread(target=loop.serve) for loop in self.replaying]
        for thread in threads:
            thread.start()
        done = self.loop.serve()
        for thread in threads:
            thread.join()
        return done

    def start(self) -> threading.Thread:
        """`serve` in a thread of its own."""
        # Alarms go to the main thread only.
        self.loop.death_penalty_class = TimerDeathPenalty
        thread = threading.Thread(target=self.serve)
        thread.start()
        return thread


def worker(
    redis: Redis,
    settings: Settings,
    references: Mapping[str, Reference] | None = None,
    stop: threading.Event | None = None,
    **limits: Any,
) -> Pool:
    """A worker with its context in place, ready to `serve`."""
    reference = (references or {}).get("toy")
    settings = declaring(settings, first=reference is not None)
    webhook, sealer = settings.webhook is not None, Sealer.of(settings.storage)
    store = Store(redis, verdict_ttl=600, webhook=webhook, sealer=sealer)
    context.use(context.Context(settings, store, {}, b"secret"))
    return Pool(redis, settings, reference, stop=stop, **limits)


def verdict_of(redis: Redis, id: str, seconds: float = PATIENCE) -> Verification:
    """Wait for a verdict."""
    store = Store(redis, verdict_ttl=600)
    wait_until(lambda: store.decided(id), seconds)
    verification = store.verdict(id)
    assert verification is not None
    return verification


def stop_when_decided(redis: Redis, id: str, stop: threading.Event) -> None:
    """Set `stop` in the background once the id has a verdict."""

    def watch() -> None:
        verdict_of(redis, id)
        stop.set()

    threading.Thread(target=watch, daemon=True).start()


def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Run Python code of this repository in a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment)
