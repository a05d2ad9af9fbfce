"""Which backend takes a request: by its standing first, then the least busy one that was last reachable."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from policies.errors import BackendUnavailable, InvalidRequest, NotFound
from policies.settings import BackendSettings, ModelSettings, Settings

State = Literal["trial", "trusted", "suspect", "quarantined"]

_REST_SECONDS = 5.0
_NONE_LEFT = "no backend of this model is available; try again later"
_AT_LIMIT = "every backend of this model is at its limit; try again soon"


@dataclass(frozen=True, slots=True)
class Standing:
    """A backend's standing as far as the proxy needs it.

    `audit_rate` is the share of its answers that is replayed, `since` the Unix second of its state, None when new.
    """

    state: State
    audit_rate: float
    since: float | None = None


@dataclass(slots=True, eq=False)
class Backend:
    """A backend and how it is doing. `resting_until` is on the monotonic clock."""

    settings: BackendSettings
    base_url: str
    standing: Standing
    outstanding: int = 0
    resting_until: float = 0.0

    @property
    def name(self) -> str:
        """The operator's name for it."""
        return self.settings.name

    @property
    def full(self) -> bool:
        """Whether it has as many requests as it may."""
        return 0 < self.settings.max_concurrency <= self.outstanding

    @property
    def quarantined(self) -> bool:
        """Whether clients' requests must not reach it."""
        return self.standing.state == "quarantined"

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Count one request for as long as it lasts."""
        self.outstanding += 1
        try:
            yield
        finally:
            self.outstanding -= 1

    def unreachable(self) -> None:
        """It could not be reached: the others go first for a while."""
        self.resting_until = time.monotonic() + _REST_SECONDS

    def reached(self) -> None:
        """It answered."""
        self.resting_until = 0.0


class Backends:
    """Every backend, by model."""

    def __init__(self, settings: Settings, chance: random.Random | None = None) -> None:
        self.models: dict[str, ModelSettings] = settings.models
        rate = settings.audit.rate
        self.new = Standing("trial", 1.0 if rate is None else rate)
        """Standing of a backend that nobody has heard of."""
        self.all = [Backend(item, _base_url(item.url), self.new) for item in settings.backends]
        self._suspect_share = settings.standing.suspect_share
        # A suspect that could foresee its turns would behave in them.
        self._chance = chance or random.SystemRandom()
        self._turns: dict[str, int] = {}

    def served_models(self) -> list[str]:
        """Names of the models that have a backend which may serve clients, in the order of the settings."""
        served = {backend.settings.model for backend in self.all if not backend.quarantined}
        return [name for name in self.models if name in served]

    def known_models(self) -> list[str]:
        """Names of the models that have a backend, whatever its standing."""
        known = {backend.settings.model for backend in self.all}
        return [name for name in self.models if name in known]

    def named(self, name: str) -> Backend | None:
        """The backend of that name."""
        return next((backend for backend in self.all if backend.name == name), None)

    def candidates(self, model: object, hint: str | None = None, *, without: Backend | None = None) -> list[Backend]:
        """Backends for one request, best first; those at their limit are left out.

        Quarantined backends are never among them, unless an admin's `hint` names one. A suspect comes after all
        others, except in `standing.suspect_share` of the turns that would be its own: then it goes first.

        Args:
            without: one that has had its chance at this request.

        Raises:
            NotFound: no such model.
            InvalidRequest: the hinted backend does not serve it.
            BackendUnavailable: all are at their limit or quarantined.
        """
        serving = [backend for backend in self.all if backend.settings.model == model]
        if not serving:
            name = model if isinstance(model, str) and len(model) <= 200 else ""
            raise NotFound(f"the model {name!r} does not exist", param="model", code="model_not_found")
        if hint is not None:
            serving = [backend for backend in serving if backend.name == hint]
            if not serving:
                raise InvalidRequest("x-countersign-backend names no backend of this model")
        else:
            serving = [backend for backend in serving if not backend.quarantined]
        serving = [backend for backend in serving if backend is not without]
        if not serving:
            raise BackendUnavailable(_NONE_LEFT)
        free = [backend for backend in serving if not backend.full]
        if not free:
            raise BackendUnavailable(_AT_LIMIT)
        return self._ordered(free)

    def _ordered(self, free: list[Backend]) -> list[Backend]:
        """Rank by rank, in each the least busy first, and equally busy ones in turn."""
        now = time.monotonic()
        model = free[0].settings.model
        turn = self._turns[model] = self._turns.get(model, 0) + 1
        chosen = self._suspects_turn(free)
        ranks: dict[tuple[bool, bool, bool], list[Backend]] = {}
        for backend in free:
            rank = backend.resting_until > now, backend is not chosen, backend.standing.state == "suspect"
            ranks.setdefault(rank, []).append(backend)
        ordered: list[Backend] = []
        for _, alike in sorted(ranks.items(), key=lambda item: item[0]):
            first = turn % len(alike)
            ordered += sorted(alike[first:] + alike[:first], key=lambda backend: backend.outstanding)
        return ordered

    def _suspects_turn(self, free: list[Backend]) -> Backend | None:
        """The suspect whose turn this is, if it is one's: each has one in `len(free)` turns, and gets its share of
        them, however busy it is, so that it stays observed."""
        suspects = [backend for backend in free if backend.standing.state == "suspect"]
        if not 0 < len(suspects) < len(free):
            return None
        mine = self._chance.randrange(len(free))
        if mine >= len(suspects) or self._chance.random() >= self._suspect_share:
            return None
        return suspects[mine]


def _base_url(url: str) -> str:
    """The address without a trailing slash or `/v1`, which operators write either way."""
    return url.rstrip("/").removesuffix("/v1")
