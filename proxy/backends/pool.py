"""Every backend that the settings declare, by model."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from policies.errors import InvalidRequest, NotFound
from policies.settings import ModelSettings, Settings
from proxy.backends.affinity import key_of
from proxy.backends.backend import Backend, Standing
from proxy.backends.group import Group
from proxy.backends.route import Route


class Backends:
    """Every backend, by model.

    What is known of their health is this process's own: another proxy sees them over another network, and one whose
    network is broken must not take them away from all.
    """

    def __init__(
        self, settings: Settings, chance: random.Random | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.models: dict[str, ModelSettings] = settings.models
        rate = settings.audit.rate
        self.new = Standing("trial", 1.0 if rate is None else rate)
        """Standing of a backend that nobody has heard of."""
        # A suspect that could foresee its turns would behave in them.
        chance = chance or random.SystemRandom()
        self.all = [
            Backend(item, self.new, settings.breaker, clock=clock, chance=chance.random) for item in settings.backends
        ]
        self._named = {backend.name: backend for backend in self.all}
        self.groups = {
            name: Group(
                name,
                members,
                model.routing or settings.routing,
                suspect_share=settings.standing.suspect_share,
                clock=clock,
                chance=chance,
            )
            for name, model in self.models.items()
            if (members := [backend for backend in self.all if backend.settings.model == name])
        }

    def served_models(self) -> list[str]:
        """Names of the models that have a backend which may serve clients, in the order of the settings."""
        return [name for name, group in self.groups.items() if not all(item.quarantined for item in group.members)]

    def known_models(self) -> list[str]:
        """Names of the models that have a backend, whatever its standing."""
        return list(self.groups)

    def named(self, name: str) -> Backend | None:
        """The backend of that name."""
        return self._named.get(name)

    def route(
        self,
        model: str,
        *,
        fields: Mapping[str, Any] | None = None,
        owner: str = "",
        hint: str | None = None,
        without: Backend | None = None,
    ) -> Route:
        """The way of one request through the backends of its model.

        Quarantined backends are never on it, unless an admin's `hint` names one.

        Args:
            fields, owner: the request's body, decoded, and whose it is; where the policy looks at them.
            without: one that has had its chance at this request.

        Raises:
            NotFound: no such model.
            InvalidRequest: the hinted backend does not serve it.
        """
        group = self.groups.get(model)
        if group is None:
            name = model if len(model) <= 200 else ""
            raise NotFound(f"the model {name!r} does not exist", param="model", code="model_not_found")
        if hint is not None:
            backend = self._named.get(hint)
            if backend is None or backend.settings.model != model:
                raise InvalidRequest("x-countersign-backend names no backend of this model")
            return Route(group, hint=backend, without=without)
        hashed = group.rules.policy == "prefix_hash" and len(group.members) > 1
        key = key_of(fields, owner, group.rules) if hashed and fields is not None else None
        return Route(group, key=key, without=without)
