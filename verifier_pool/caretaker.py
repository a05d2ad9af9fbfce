"""Keeps the reference of one replay loop sound: its canaries, what waits for them, and its restarts."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time

from redis.exceptions import RedisError

from policies.errors import ReplayError
from verifier_pool.flights import Flight
from verifier_pool.reference.base import Reference
from verifier_pool.replays import CANARIES, Stamp
from verifier_pool.stages import Stages
from verifier_pool.vouching import Vouching

logger = logging.getLogger(__name__)

RESTART_SECONDS = (1.0, 5.0, 15.0, 60.0)
"""Waits before a reference is started again that did not start; the last one repeats."""

PATIENCE_SECONDS = 30.0
"""How long a loop that is done with everything else goes on asking a reference that gives nothing back."""


class Caretaker:
    """Of one reference, by the thread of its loop.

    Attributes:
        wanted: something waits for a canary.
        in_vain: since when canaries are wanted and none says anything (seconds of the monotonic clock), or None.
        freed: how many responses are judged again because of what canaries said.
    """

    def __init__(self, label: str, reference: Reference, stages: Stages, stop: threading.Event) -> None:
        """
        Args:
            label: of the model, as counters spell it.
        """
        self._label = label
        self._reference = reference
        self._redis = stages.redis
        self._vouching = Vouching(stages)
        self._patience = stages.settings.job_timeout
        self._stop = stop
        self._noted = self.instance
        self._bad: Flight | None = None
        self.wanted = False
        self.in_vain: float | None = None
        self.freed = 0

    @property
    def instance(self) -> str:
        """The reference as it is now; after a restart it is another one. Empty for one without canaries."""
        canary = self._reference.canary
        return "" if canary is None else f"{canary.token}.{self._reference.life}"

    @property
    def unsound(self) -> bool:
        """Whether a canary came back wrong that was not acted on."""
        return self._bad is not None

    def stamp(self, flight: Flight) -> Stamp | None:
        """Who replayed this, now that it is back; None where no canary can speak for that."""
        canary = self._reference.canary
        known = canary is not None and canary.possible and flight.instance
        return Stamp(flight.instance, canary.sent) if canary is not None and known else None

    def look(self, *, burst: bool = False) -> None:
        """Say that this reference is there, and see whether anything waits for a canary of it. About once a second.

        Args:
            burst: it comes back only when everything else was done.
        """
        canary = self._reference.canary
        if canary is None:
            return
        now = self.instance
        if self._noted != now:
            if self._noted:
                self._answer(self._noted, over=1)
            self._noted = now
        self._vouching.present(now, burst=burst)
        self.wanted = self._vouching.wanted(now)
        if self.wanted and not canary.possible:
            self._answer(now, none=1)
        self.in_vain = (self.in_vain or time.monotonic()) if self.wanted else None

    def patient(self) -> bool:
        """Whether it is worth staying for what waits, where there is nothing else to do."""
        return self.wanted and (self.in_vain is None or time.monotonic() < self.in_vain + PATIENCE_SECONDS)

    def canary(self, *, flying: bool) -> Flight | None:
        """The next canary if it is time for one.

        Args:
            flying: there is traffic to mix it into. Where something waits for a canary, it needs none.
        """
        canary = self._reference.canary
        if canary is None or not (flying or self.wanted) or not canary.due(time.monotonic(), wanted=self.wanted):
            return None
        flight = Flight(None)
        flight.instance = self.instance
        flight.requests = canary.requests()
        flight.tokens = sum(request.tokens for request in flight.requests)
        flight.number = canary.sent
        flight.patience = float(self._patience)
        return flight

    def judge(self, flight: Flight) -> None:
        """See what a canary says that ended and was settled."""
        canary = self._reference.canary
        assert canary is not None
        sound = canary.judge(flight.replays)
        if sound is None:
            return
        if not sound:
            self._bad = flight
        self._redis.hincrby(CANARIES, f"{self._label}:{'passed' if sound else 'failed'}", 1)
        if sound and flight.instance == self.instance:
            self._answer(flight.instance, good=flight.number)

    def distrust(self) -> None:
        """A canary came back wrong: what this instance said, and nobody vouched for since, does not count."""
        assert self._bad is not None
        logger.critical("the reference of %s computes wrong numbers by its canary; it is started again", self._label)
        self._answer(self._bad.instance, bad=self._bad.number)

    def restart(self) -> None:
        """Start the reference again, as often as it takes or until `stop`; it is another one then."""
        self._bad = None
        before = self.instance
        for wait in itertools.chain(RESTART_SECONDS, itertools.repeat(RESTART_SECONDS[-1])):
            try:
                self._reference.restart()
                break
            except ReplayError as error:
                logger.critical("the reference of %s does not start: %s", self._label, error.reason)
                if self._stop.wait(wait):
                    break
        if self._reference.canary is not None:
            self._reference.canary.renew()
        self._noted = self.instance
        try:
            self._redis.hincrby(CANARIES, f"{self._label}:restarts", 1)
            if before:
                self._answer(before, over=1)
        except RedisError:
            logger.warning("a restart was not counted")

    def leave(self) -> None:
        """No more canaries of this instance."""
        canary, before = self._reference.canary, self.instance
        if canary is not None:
            canary.renew()
            with contextlib.suppress(RedisError):
                self._answer(before, over=1)

    def _answer(self, instance: str, **said: int) -> None:
        self.freed += self._vouching.answer(instance, **said)
        self.wanted = False
