"""Which backend takes a request: the least busy one of its model that was last reachable."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from policies.errors import BackendUnavailable, InvalidRequest, NotFound
from policies.settings import BackendSettings, ModelSettings, Settings

_REST_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class Backend:
    """A backend and how it is doing. `resting_until` is on the monotonic clock."""

    settings: BackendSettings
    base_url: str
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

    def __init__(self, settings: Settings) -> None:
        self.models: dict[str, ModelSettings] = settings.models
        self.all = [Backend(item, _base_url(item.url)) for item in settings.backends]
        self._turn = 0

    def served_models(self) -> list[str]:
        """Names of the models that have a backend, in the order of the settings."""
        served = {backend.settings.model for backend in self.all}
        return [name for name in self.models if name in served]

    def candidates(self, model: object, hint: str | None = None) -> list[Backend]:
        """Backends for one request, best first; those at their limit are left out.

        Raises:
            NotFound: no such model.
            InvalidRequest: the hinted backend does not serve it.
            BackendUnavailable: all are at their limit.
        """
        serving = [backend for backend in self.all if backend.settings.model == model]
        if not serving:
            name = model if isinstance(model, str) and len(model) <= 200 else ""
            raise NotFound(f"the model {name!r} does not exist", param="model", code="model_not_found")
        if hint is not None:
            serving = [backend for backend in serving if backend.name == hint]
            if not serving:
                raise InvalidRequest("x-countersign-backend names no backend of this model")
        free = [backend for backend in serving if not backend.full]
        if not free:
            raise BackendUnavailable("every backend of this model is at its limit; try again soon")
        self._turn += 1
        now = time.monotonic()
        turned = free[self._turn % len(free) :] + free[: self._turn % len(free)]
        return sorted(turned, key=lambda backend: (backend.resting_until > now, backend.outstanding))


def _base_url(url: str) -> str:
    """The address without a trailing slash or `/v1`, which operators write either way."""
    return url.rstrip("/").removesuffix("/v1")
