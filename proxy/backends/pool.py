"""Every backend that the settings declare, by model."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from policies.errors import InvalidRequest, NotFound
from policies.settings import BackendSettings, BreakerSettings, ModelSettings, Settings
from proxy.backends.affinity import key_of
from proxy.backends.backend import Backend, Standing
from proxy.backends.group import Group
from proxy.backends.route import Route

_MOST_GONE = 100
"""Backends without requests that are remembered after they are gone."""


class Backends:
    """Every backend, by model.

    What is known of their health is this process's own: another proxy sees them over another network, and one whose
    network is broken must not take them away from all.
    """

    def __init__(
        self, settings: Settings, chance: random.Random | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # A suspect that could foresee its turns would behave in them.
        self._chance = chance or random.SystemRandom()
        self._clock = clock
        self.all: list[Backend] = []
        self.groups: dict[str, Group] = {}
        self._named: dict[str, Backend] = {}
        self._gone: dict[str, Backend] = {}
        self.renew(settings)

    def renew(self, settings: Settings, standings: Mapping[str, Standing] | None = None) -> None:
        """Take over other settings, all at once: who is routed from here on is routed by them, and what is under way
        goes on as it began. A backend whose settings are the same stays what it is, also where it was away meanwhile.

        Args:
            standings: by backend, of those that are declared to run something else than before.
        """
        rate = settings.audit.rate
        self.new = Standing("trial", 1.0 if rate is None else rate)
        """Standing of a backend that nobody has heard of."""
        self.models: Mapping[str, ModelSettings] = settings.models
        known = self._gone | self._named
        self.all = [
            self._renewed(item, known.pop(item.name, None), settings.breaker, standings or {})
            for item in settings.backends
        ]
        self._named = {backend.name: backend for backend in self.all}
        self._gone = _remembered(known)
        members: dict[str, list[Backend]] = {name: [] for name in self.models}
        for backend in self.all:
            members[backend.settings.model].append(backend)
        before, self.groups = self.groups, {}
        for name, found in members.items():
            if found:
                self.groups[name] = self._group(before.pop(name, None), name, found, settings)
        for group in before.values():
            group.renew([], group.rules, suspect_share=0.0)

    def _renewed(
        self, item: BackendSettings, old: Backend | None, breaker: BreakerSettings, standings: Mapping[str, Standing]
    ) -> Backend:
        if old is None or old.settings != item:
            standing = standings.get(item.name, self.new if old is None else old.standing)
            backend = Backend(item, standing, breaker, clock=self._clock, chance=self._chance.random)
            if old is not None:
                backend.follow(old)
            old = backend
        old.obey(breaker)
        return old

    def _group(self, old: Group | None, name: str, members: list[Backend], settings: Settings) -> Group:
        rules = settings.models[name].routing or settings.routing
        share = settings.standing.suspect_share
        if old is not None:
            old.renew(members, rules, suspect_share=share)
            return old
        return Group(name, members, rules, suspect_share=share, clock=self._clock, chance=self._chance)

    def served_models(self) -> list[str]:
        """Names of the models that have a backend which may serve clients, in the order of the settings."""
        return [name for name, group in self.groups.items() if not all(item.closed for item in group.members)]

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

        Quarantined and drained backends are never on it, unless an admin's `hint` names one.

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


def _remembered(gone: Mapping[str, Backend]) -> dict[str, Backend]:
    """Those whose requests would be forgotten if they came back, and the last ones without any: their health would."""
    idle = [name for name, backend in gone.items() if not backend.outstanding]
    forgotten = set(idle[:-_MOST_GONE])
    return {name: backend for name, backend in gone.items() if name not in forgotten}
