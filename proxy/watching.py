"""Standing and health of backends, as metrics: read when somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from policies.record import STATES
from proxy.backends.backend import Backend
from proxy.backends.breaker import STATES as BREAKER_STATES
from proxy.backends.group import Group
from verifier_pool.link.meters import Labels, Meters, Observed

_BY = ("backend", "model")


def watch(meters: Meters, groups: Callable[[], Sequence[Group]]) -> None:
    """Observe the backends of these groups."""

    def backends() -> Iterable[tuple[Backend, dict[str, str]]]:
        for group in groups():
            for backend in group.members:
                yield backend, {"backend": backend.name, "model": backend.settings.model}

    def each(look: Callable[[Backend], float]) -> Callable[[], Observed]:
        return lambda: [(look(backend), labels) for backend, labels in backends()]

    def states() -> Observed:
        for backend, labels in backends():
            for state in STATES:
                yield int(backend.standing.state == state), labels | {"state": state}

    def breakers() -> Observed:
        for backend, labels in backends():
            for state in BREAKER_STATES:
                yield int(backend.breaker.state == state), labels | {"state": state}

    def queued() -> list[tuple[float, Labels]]:
        return [(len(group.waiting), {"model": group.model}) for group in groups()]

    stated = (*_BY, "state")
    meters.observe("countersign.backend.breaker", "1", "1 for the breaker's state", stated, breakers)
    meters.observe("countersign.backend.up", "1", "Whether probes find it well", _BY, each(lambda one: int(one.up)))
    meters.observe(
        "countersign.backend.outstanding", "{request}", "Requests it has", _BY, each(lambda one: one.outstanding)
    )
    meters.observe("countersign.queued", "{request}", "Requests that wait for a backend", ["model"], queued)
    meters.observe("countersign.backend.state", "1", "1 for the backend's state", stated, states)
    meters.observe(
        "countersign.backend.audit_rate",
        "1",
        "Share of its answers that is replayed",
        _BY,
        each(lambda one: one.standing.audit_rate),
    )
