"""Counters and histograms, on OpenTelemetry meters, read by Prometheus at `/metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader  # type: ignore[attr-defined,import-not-found,unused-ignore]
from opentelemetry.metrics import CallbackOptions, Observation  # type: ignore[attr-defined,import-not-found,unused-ignore]
from opentelemetry.sdk.metrics import MeterProvider  # type: ignore[attr-defined,import-not-found,unused-ignore]
from opentelemetry.sdk.resources import Resource  # type: ignore[attr-defined,import-not-found,unused-ignore]
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from policies.record import STATES
from proxy.backends.backend import Backend
from proxy.backends.breaker import STATES as BREAKER_STATES
from proxy.backends.group import Group
from proxy.generation import Generation

CONTENT_TYPE = CONTENT_TYPE_LATEST
_FAST = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)


class Metrics:
    """What the proxy counts. Labels are names the operator chose, never ids or keys.

    requests                 relayed requests by model, backend and the status the client got
    in_flight                requests being served
    verdicts                 verdicts on this process's generations, by word and backend
    unrecorded               generations whose evidence could not be queued, by reason and backend
    asked_another            backends that failed a request which another one was then asked for, by why
    probes                   background probes by backend and what they found, on the page for admins
    queue_wait               seconds that requests stood in the queue of a model whose backends were all at their limit
    refused                  requests that were not let in, by reason: a limit of their key, or the key itself
    unlimited                requests of limited keys that were let in uncounted, because Redis was away
    retried                  rejected answers for which another backend was asked, by model and backend
    overhead                 seconds the proxy itself took: all but waiting for backend, client and verdict
    inline_wait              seconds a client waited for its inline verdict
    first_token, duration    seconds until the first byte and the last, under OpenTelemetry's GenAI names

    What is thought of backends (`watch`) is on a page of its own, as is what waits for a verdict (`waits`), which is
    mostly audits: whoever knows its audit rate knows when to cheat.
    """

    def __init__(self) -> None:
        self._registry, self._private = CollectorRegistry(), CollectorRegistry()
        self._providers = [_provider(self._registry), _provider(self._private)]
        meter = self._providers[0].get_meter("countersign")
        self.requests = meter.create_counter("countersign.requests", "1", "Relayed requests")
        self._meter = meter
        self.verdicts = meter.create_counter("countersign.verdicts", "1", "Verdicts seen")
        self.unrecorded = meter.create_counter("countersign.unrecorded", "1", "Generations without queued evidence")
        self.refused = meter.create_counter("countersign.refused", "1", "Requests that were not let in")
        self.unlimited = meter.create_counter("countersign.unlimited", "1", "Requests let in without their limits")
        private = self._providers[1].get_meter("countersign")
        self._backlog = private.create_gauge("countersign.backlog", "1", "Generations that wait for their verdict")
        self.probes = private.create_counter("countersign.backend.probes", "1", "Background probes")
        self._held = private.create_gauge("countersign.backlog.size", "By", "Bytes of Redis that wait for verdicts")
        self.retried = meter.create_counter("countersign.retried", "1", "Rejected answers asked for again elsewhere")
        self.asked_another = meter.create_counter("countersign.asked_another", "1", "Requests that went on elsewhere")
        self.queue_wait = meter.create_histogram(
            "countersign.queue_wait.duration",
            "s",
            "Time a request waited because every backend was at its limit",
            explicit_bucket_boundaries_advisory=_FAST,
        )
        self.overhead = meter.create_histogram(
            "countersign.overhead.duration",
            "s",
            "Time the proxy itself took: total, less waiting for backend, client and verdict",
            explicit_bucket_boundaries_advisory=_FAST,
        )
        self.inline_wait = meter.create_histogram(
            "countersign.inline_wait.duration",
            "s",
            "Time a client waited for its inline verdict",
            explicit_bucket_boundaries_advisory=_DURATION,
        )
        self.first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "Time to the first byte of the answer",
            explicit_bucket_boundaries_advisory=_FIRST_TOKEN,
        )
        self.duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            "s",
            "Time to the last byte of the answer",
            explicit_bucket_boundaries_advisory=_DURATION,
        )

    def passed_over(self, generation: Generation, reason: str) -> None:
        """The backend of this generation failed it, and another one is asked."""
        labels = {"model": generation.model, "backend": generation.backend, "reason": reason}
        self.asked_another.add(1, labels)

    def waits(self, generations: Mapping[str, int], held: Mapping[str, int]) -> None:
        """How many generations of which backend wait for their verdict, and how many bytes of Redis with them, as it
        was when an answer was last recorded here."""
        for gauge, counts in ((self._backlog, generations), (self._held, held)):
            for backend, count in counts.items():
                gauge.set(count, {"backend": backend})

    def count_flights(self, in_flight: Callable[[], int]) -> None:
        """Show how many requests are being served, whenever somebody looks."""

        def now(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(in_flight())]

        self._meter.create_observable_up_down_counter(
            "countersign.in_flight", [now], unit="1", description="Requests being served"
        )

    def watch(self, groups: Sequence[Group]) -> None:
        """Show standing and health of these backends, as they are whenever somebody looks."""
        backends = [backend for group in groups for backend in group.members]

        def states(_: CallbackOptions) -> Iterable[Observation]:
            for backend in backends:
                for state in STATES:
                    yield Observation(int(backend.standing.state == state), _labels(backend) | {"state": state})

        def rates(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(backend.standing.audit_rate, _labels(backend)) for backend in backends]

        def breakers(_: CallbackOptions) -> Iterable[Observation]:
            for backend in backends:
                for state in BREAKER_STATES:
                    yield Observation(int(backend.breaker.state == state), _labels(backend) | {"state": state})

        def up(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(int(backend.up), _labels(backend)) for backend in backends]

        def outstanding(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(backend.outstanding, _labels(backend)) for backend in backends]

        def queued(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(len(group.waiting), {"model": group.model}) for group in groups]

        meter = self._providers[1].get_meter("countersign")
        meter.create_observable_gauge(
            "countersign.backend.breaker", [breakers], description="1 for the breaker's state"
        )
        meter.create_observable_gauge("countersign.backend.up", [up], description="Whether probes find it well")
        meter.create_observable_gauge("countersign.backend.outstanding", [outstanding], description="Requests it has")
        meter.create_observable_gauge("countersign.queued", [queued], description="Requests that wait for a backend")
        meter.create_observable_gauge("countersign.backend.state", [states], description="1 for the backend's state")
        meter.create_observable_gauge("countersign.backend.audit_rate", [rates], description="Share that is replayed")

    def page(self, *, private: bool = False) -> bytes:
        """The Prometheus text page; with `private` also what is thought of backends."""
        public = generate_latest(self._registry)
        return public + generate_latest(self._private) if private else public

    def close(self) -> None:
        """Let go of the meters."""
        for provider in self._providers:
            provider.shutdown()


def _provider(registry: CollectorRegistry) -> MeterProvider:
    reader = PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=registry)
    return MeterProvider([reader], Resource.get_empty(), shutdown_on_exit=False)


def _labels(backend: Backend) -> dict[str, Any]:
    return {"backend": backend.name, "model": backend.settings.model}
