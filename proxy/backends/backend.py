"""A backend as this proxy knows it: its standing, its health, and what it is busy with."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from policies.settings import BackendSettings, BreakerSettings, HealthSettings
from proxy.backends.breaker import Breaker, Entry, Failure

logger = logging.getLogger(__name__)

State = Literal["trial", "trusted", "suspect", "quarantined"]

WELL, RESTING, UNWELL, FAILING = range(4)
"""Ranks, in the order in which backends are asked: nothing is wrong; it said that it is busy, or could not be reached a
moment ago; its health endpoint says that it is not well; its breaker is open although it can be reached."""

_REST_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Standing:
    """A backend's standing as far as the proxy needs it.

    `audit_rate` is the share of its answers that is replayed, `since` the Unix second of its state, None when new.
    """

    state: State
    audit_rate: float
    since: float | None = None


@dataclass(frozen=True, slots=True)
class Trouble:
    """What went wrong last, and when (Unix seconds)."""

    kind: Failure | str
    at: float


class Backend:
    """A backend and how it is doing.

    Attributes:
        outstanding: requests that it has now.
        up: what background probes say; true as long as there are none.
        failure, complaint: the last failure of a request, and of a probe.
        changed: called whenever its rank may be another one.
        freed: called when a place is free again.
    """

    __slots__ = (
        "_clock",
        "_heir",
        "_lost",
        "_probes_in_a_row",
        "_rules",
        "_standing",
        "base_url",
        "breaker",
        "changed",
        "complaint",
        "failure",
        "freed",
        "outstanding",
        "resting_until",
        "settings",
        "up",
    )

    def __init__(
        self,
        settings: BackendSettings,
        standing: Standing,
        breaker: BreakerSettings,
        *,
        clock: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.base_url = _base_url(settings.url)
        self.breaker = Breaker(breaker, chance)
        self.outstanding = 0
        self.resting_until = 0.0
        self.up = True
        self.failure: Trouble | None = None
        self.complaint: Trouble | None = None
        self.changed: Callable[[], None] = _nothing
        self.freed: Callable[[Backend], None] = _nobody
        self._standing = standing
        self._heir: Backend | None = None
        self._rules = breaker
        self._clock = clock
        self._probes_in_a_row = 0
        self._lost = False

    @property
    def name(self) -> str:
        """The operator's name for it."""
        return self.settings.name

    @property
    def standing(self) -> Standing:
        """What the workers think of it, as the proxy last heard."""
        return self._standing

    @standing.setter
    def standing(self, standing: Standing) -> None:
        moved = standing.state != self._standing.state
        self._standing = standing
        if moved:
            self.changed()

    @property
    def full(self) -> bool:
        """Whether it has as many requests as it may."""
        return 0 < self.settings.max_concurrency <= self.outstanding

    @property
    def closed(self) -> bool:
        """Whether clients' requests go elsewhere by somebody's decision: it is quarantined, or drained."""
        return self.settings.drained or self.quarantined

    @property
    def quarantined(self) -> bool:
        """Whether clients' requests must not reach it."""
        return self._standing.state == "quarantined"

    def rank(self, now: float) -> int | None:
        """How soon it is asked, lowest first; None when it is not."""
        if self.closed:
            return None
        if not self.breaker.admits(now):
            return FAILING if self.breaker.reached else None
        if not self.up:
            return UNWELL
        return RESTING if self.resting_until > now else WELL

    def next_change(self, now: float) -> float:
        """When its rank changes by itself, if nothing happens."""
        times = [self.resting_until] if self.breaker.state == "closed" else [self.resting_until, self.breaker.until]
        return min((at for at in times if at > now), default=float("inf"))

    def enter(self) -> Entry:
        """A request takes its place here; `leave` gives it back, and `over` says that it has no more to say."""
        self._count(1)
        before = self.breaker.state
        entry = self.breaker.enter(self._clock())
        self._tell(before)
        if entry.probe:
            self._present().changed()
        return entry

    def leave(self) -> None:
        """The backend is busy with one request less."""
        self._count(-1)

    def over(self, entry: Entry) -> None:
        """A request is over, and what it had to say of the backend was said."""
        self.breaker.left(entry, self._clock())
        if entry.probe:
            self._present().changed()

    def _count(self, requests: int) -> None:
        """So many more are under way here: at this one, and at those that took its place meanwhile."""
        backend: Backend | None = self
        while backend is not None:
            backend.outstanding += requests
            if requests < 0:
                backend.freed(backend)
            backend = backend._heir

    def follow(self, old: Backend) -> None:
        """Take the place of a backend of the same name: what is under way there counts here, too, and where the address
        is the same so does what is known of its health, now and later. Requests that go on there go on by its settings.
        """
        self.outstanding = old.outstanding
        old._heir = self
        old.changed, old.freed = _nothing, _nobody
        if self.base_url == old.base_url:
            self.breaker, self.up, self.resting_until = old.breaker, old.up, old.resting_until
            self.failure, self.complaint, self._lost = old.failure, old.complaint, old._lost
            self._probes_in_a_row = old._probes_in_a_row

    def _present(self) -> Backend:
        """Who stands for this address now: what requests say of it is said to them, wherever they began."""
        backend = self
        while (heir := backend._heir) is not None and heir.base_url == backend.base_url:
            backend = heir
        return backend

    def obey(self, breaker: BreakerSettings) -> None:
        """Other rules hold for its breaker."""
        self._rules = self.breaker.rules = breaker

    def began(self, entry: Entry) -> None:
        """An answer began."""
        here = self._present()
        if here._lost:
            here._rest(0)
        before = here.breaker.state
        if here.breaker.began(entry):
            here._tell(before)
            here.changed()

    def finished(self, entry: Entry) -> None:
        """An answer ended well."""
        here = self._present()
        before = here.breaker.state
        if here.breaker.finished(entry):
            here._tell(before)
            here.changed()

    def failed(self, entry: Entry, kind: Failure) -> None:
        """A request failed."""
        here = self._present()
        here.failure = Trouble(kind, time.time())
        if kind == "unreachable" and here.resting_until < here._clock() + _REST_SECONDS:
            here._rest(_REST_SECONDS)
            here._lost = True
        before = here.breaker.state
        if here.breaker.failed(entry, kind, here._clock()):
            here._tell(before)
            here.changed()

    def rest(self, seconds: float) -> None:
        """It wants the others to go first for so long; it gets `breaker.longest_rest` at most."""
        here = self._present()
        here._rest(min(seconds, here._rules.longest_rest))

    def _rest(self, seconds: float) -> None:
        self._lost = False
        self.resting_until = self._clock() + seconds if seconds > 0 else 0.0
        self.changed()

    def probed(self, problem: str | None, rules: HealthSettings) -> None:
        """A background probe is back; `problem` says what is wrong, None that nothing is."""
        well = problem is None
        if problem is not None:
            self.complaint = Trouble(problem, time.time())
        self._probes_in_a_row = 0 if well == self.up else self._probes_in_a_row + 1
        if self._probes_in_a_row < (rules.up_after if well else rules.down_after):
            return
        if well != self.up:
            self.up, self._probes_in_a_row = well, 0
            logger.warning(
                "a backend is well again" if well else "a backend is not well; it is asked last",
                extra={"backend": self.name} | ({} if well else {"why": problem}),
            )
            self.changed()

    def health(self) -> dict[str, Any]:
        """How it is doing, as JSON has words for it. Times are Unix seconds, durations seconds."""
        now = self._clock()
        breaker = self.breaker
        return {
            "up": self.up,
            "resting": round(max(0.0, self.resting_until - now), 3),
            "breaker": {
                "state": breaker.state,
                "failures": breaker.failures,
                "tried_in": None if breaker.state == "closed" else round(max(0.0, breaker.until - now), 3),
            },
            "last_failure": None if self.failure is None else asdict(self.failure),
            "last_probe_failure": None if self.complaint is None else asdict(self.complaint),
        }

    def _tell(self, before: str) -> None:
        """Log a breaker's new state."""
        breaker = self.breaker
        if breaker.state == before:
            return
        extra = {"backend": self.name, "breaker": breaker.state}
        if breaker.state == "open":
            seconds = round(breaker.until - self._clock(), 3)
            logger.warning("a backend's breaker opened", extra=extra | {"why": breaker.kind, "seconds": seconds})
        else:
            logger.warning("a backend's breaker changed", extra=extra)


def _base_url(url: str) -> str:
    """The address without a trailing slash or `/v1`, which operators write either way."""
    return url.rstrip("/").removesuffix("/v1")


def _nothing() -> None:
    pass


def _nobody(_: Backend) -> None:
    pass
