"""What a worker process counts of its own work. docs/metrics.md has all of it.

These live in the process that counts and begin at 0 with it, as Prometheus expects of a counter; what must survive any
crash, the verdicts, is counted in Redis (`policies.tally`). Labels are names of models and words of ours.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime

from policies import tally
from policies.errors import ReplayError
from policies.evidence import Evidence
from verifier_pool.flights import Fate, Flight
from verifier_pool.link.fair import SUFFIXES
from verifier_pool.link.meters import FAST, OTHER, WAITING, Meters

METERS = Meters()

_RAN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

STANDS_SECONDS = 120.0
"""For how long a process counts as standing still after its last failure: what it holds back comes again sooner
(`standstill.HOLD_SECONDS`), unless others took it or nothing is left."""

_jobs = METERS.counter(
    "countersign.jobs",
    "{job}",
    "Jobs that this process ran, by stage; replays by model, too",
    ("stage", "model", "result"),
)
_delay = METERS.histogram(
    "countersign.job.delay", "s", "Time a job waited in its queue", ("stage", "model"), bounds=WAITING
)
_duration = METERS.histogram(
    "countersign.job.duration", "s", "Time a job took; a replay's in its reference", ("stage", "model"), bounds=_RAN
)
_given_up = METERS.counter(
    "countersign.jobs.given_up", "{job}", "Jobs that failed for good, by why", ("queue", "reason")
)
_replays = METERS.counter(
    "countersign.replays",
    "{replay}",
    "Replays that came back: `done`, or why not; of each choice of a response one",
    ("model", "reference", "outcome"),
)
_tokens = METERS.counter(
    "countersign.replay.tokens", "{token}", "Tokens replayed, of prompts and of answers", ("model", "reference")
)
_busy = METERS.counter(
    "countersign.replay.busy", "s", "Time during which a reference had anything to replay", ("model", "reference")
)
_in_flight = METERS.gauge(
    "countersign.replays.in_flight", "{job}", "Jobs that a reference holds", ("model", "reference")
)
_tokens_in_flight = METERS.gauge(
    "countersign.replay.tokens.in_flight", "{token}", "Tokens that a reference holds", ("model", "reference")
)
_verdict_delay = METERS.histogram(
    "countersign.verdict.delay",
    "s",
    "Time from a backend's last byte to the verdict, by whether it was audited",
    ["audited"],
    bounds=WAITING,
)
_stands: dict[tuple[str, str], float] = {}
METERS.observe(
    "countersign.worker.standstill",
    "1",
    "1 where jobs fail and none succeeds, whosever fault that is",
    ("stage", "model"),
    lambda: [
        (int(time.monotonic() - at < STANDS_SECONDS), {"stage": stage, "model": model})
        for (stage, model), at in list(_stands.items())
    ],
)
_deliveries = METERS.counter(
    "countersign.webhook.deliveries",
    "{event}",
    "Tries to deliver an event: `delivered`, the class of another status, or what kept it from being sent",
    ["outcome"],
)
_deliveries.add(0, {"outcome": "delivered"})
_delivery = METERS.histogram(
    "countersign.webhook.duration", "s", "Time a receiver took to answer", bounds=(*FAST, 10.0, 15.0)
)
_arrived = METERS.histogram(
    "countersign.webhook.delay",
    "s",
    "Time until an event reached a webhook, failed tries included",
    bounds=(0.5, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0, 21_600.0, 86_400.0, 259_200.0),
)


def stage_of(meta: object, default: str = OTHER) -> str:
    """The stage that a job's `meta` names, or else that of its queue."""
    stage = meta.get("stage") if isinstance(meta, dict) else None
    return stage if isinstance(stage, str) and stage in SUFFIXES else default


def taken(stage: str, enqueued_at: datetime | None, model: str = "") -> None:
    """A job begins that was queued then."""
    if enqueued_at is not None:
        waited = max(0.0, time.time() - enqueued_at.timestamp())
        _delay.record(waited, {"stage": stage, "model": model})


def ran(stage: str, seconds: float, *, well: bool) -> None:
    """A job of a CPU worker, or of the webhook's, is over."""
    labels = {"stage": stage, "model": ""}
    _duration.record(seconds, labels)
    _jobs.add(1, labels | {"result": "done" if well else "failed"})


def stands(stage: str, model: str = "", *, still: bool) -> None:
    """Whether nothing that this process does of a stage succeeds."""
    _stands[stage, model] = time.monotonic() if still else -STANDS_SECONDS


def gave_up(queue: str, reason: str) -> None:
    """A job failed for good."""
    _given_up.add(1, {"queue": queue, "reason": tally.code_of(reason)})


def decided(choices: Sequence[Evidence], decided_at: float, *, audited: bool) -> None:
    """A verdict was stored."""
    over = choices[0].created + (choices[0].total_seconds or 0.0)
    _verdict_delay.record(max(0.0, decided_at - over), {"audited": "yes" if audited else "no"})


def delivered(status: int | None, error: str, seconds: float) -> None:
    """A receiver was asked to take an event."""
    well = status is not None and 200 <= status < 300
    undelivered(("delivered" if well else f"{status // 100}xx") if status is not None else error)
    _delivery.record(seconds)


def undelivered(why: str, count: int = 1) -> None:
    """Events were not sent at all, or what came of sending one."""
    _deliveries.add(count, {"outcome": why})


def arrived(seconds: float) -> None:
    """An event reached a webhook so long after it was to be told."""
    _arrived.record(max(0.0, seconds))


class Reference:
    """What is counted of one reference of this process."""

    def __init__(self, model: str, *, second: bool) -> None:
        self.model = model
        self._labels = {"model": model, "reference": "second" if second else "first"}
        self._stage = "replay2" if second else "replay"
        self._noted = time.monotonic()
        self._flying = False
        for counter in (_tokens, _busy):
            counter.add(0, self._labels)
        _replays.add(0, self._labels | {"outcome": "done"})
        self.holds(0, 0)
        self.stands(still=False)

    def stands(self, *, still: bool) -> None:
        """Whether nothing that it is given succeeds."""
        stands(self._stage, self.model, still=still)

    def holds(self, jobs: int, tokens: int) -> None:
        """It has so much to do now."""
        now = time.monotonic()
        if self._flying:
            _busy.add(now - self._noted, self._labels)
        self._noted, self._flying = now, jobs > 0
        _in_flight.set(jobs, self._labels)
        _tokens_in_flight.set(tokens, self._labels)

    def landed(self, batch: Sequence[tuple[Flight, Fate]]) -> None:
        """These came back, and what becomes of them is stored."""
        for flight, fate in batch:
            labels = {"stage": self._stage, "model": self.model}
            _jobs.add(1, labels | {"result": "done" if fate is Fate.DONE else "failed"})
            _duration.record(time.monotonic() - flight.began, labels)
            for outcome in flight.outcomes:
                why = tally.code_of(outcome.reason) if isinstance(outcome, ReplayError) else "done"
                _replays.add(1, self._labels | {"outcome": why})
            if flight.failure is not None:
                _replays.add(1, self._labels | {"outcome": "fell"})
            elif fate is Fate.DONE and any(each is not None for each in flight.replays):
                _tokens.add(flight.tokens, self._labels)
