"""Spans of a process. What is traced is decided once, by the proxy; everybody later goes by the context that came along
with the work (`policies.traceparent`), and makes no span without one.

Spans carry names and numbers of ours, those of `names.ATTRIBUTES` alone: never a prompt, an answer, a key, or what a
backend said.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar

from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_SDK_DISABLED
from opentelemetry.sdk.trace import Span, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from policies import traceparent
from policies.settings import TelemetrySettings
from policies.traceparent import TraceContext
from verifier_pool.link.telemetry import log, names
from verifier_pool.link.telemetry.exporters import open_exporter
from verifier_pool.link.telemetry.resource import resource_of

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value | None]

_LONGEST = 256
_LARGEST = 2**63 - 1
_QUEUE, _BATCH, _DELAY_MS = 8192, 512, 1000
_END_SECONDS = 5.0


class Spanned:
    """A span that runs: what it is called, and what is said of it."""

    __slots__ = ("_kind", "_span", "tracing")

    def __init__(self, tracing: Tracing, kind: str, span: Span) -> None:
        self.tracing = tracing
        self._kind = kind
        self._span = span

    @property
    def context(self) -> str:
        """What hangs on it gets this along, as a `traceparent`."""
        return traceparent.encode(self._place)

    @property
    def trace_id(self) -> str:
        """As in a `traceparent`."""
        return f"{self._place.trace_id:032x}"

    @property
    def _place(self) -> TraceContext:
        context = self._span.get_span_context()
        assert context is not None
        return TraceContext(context.trace_id, context.span_id)

    def rename(self, name: str) -> None:
        """Call it something else, now that more is known."""
        self._span.update_name(name)

    def set(self, attributes: Attributes) -> None:
        """Say more of it; None says nothing."""
        self._span.set_attributes(_checked(self._kind, attributes))

    def event(self, name: str, at: int) -> None:
        """Something happened, in nanoseconds of Unix time."""
        self._span.add_event(name, timestamp=at)

    def failed(self, why: str) -> None:
        """It did not end well; the first that is said counts."""
        if self._span.status.status_code is not StatusCode.ERROR:
            self._span.set_status(Status(StatusCode.ERROR))
            self.set({names.ERROR: why})

    def end(self, at: int | None = None) -> None:
        """It is over, now or since then (nanoseconds of Unix time)."""
        self._span.end(at)


_here: ContextVar[Spanned | None] = ContextVar("here", default=None)


class Tracing:
    """Makes spans and hands them to an exporter, on a thread of its own: nobody waits for it, and where it cannot keep
    up spans are lost.

    Args:
        process: what this process is (`proxy`, `worker`, …).

    Raises SettingsError.
    """

    def __init__(self, settings: TelemetrySettings, process: str) -> None:
        self.client_context = settings.client_context
        self._share = settings.sampling
        limits = SpanLimits(max_span_attribute_length=_LONGEST, max_links=1, max_events=8)
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=resource_of(settings, process),
            span_limits=limits,
            shutdown_on_exit=False,
        )
        self._processor = BatchSpanProcessor(
            open_exporter(settings),
            max_queue_size=_QUEUE,
            max_export_batch_size=_BATCH,
            schedule_delay_millis=_DELAY_MS,
        )
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("countersign")

    @classmethod
    def open(cls, settings: TelemetrySettings, process: str) -> Tracing | None:
        """None where nothing is traced, be it because of OpenTelemetry's own switch. Raises SettingsError."""
        off = settings.traces == "none" or os.environ.get(OTEL_SDK_DISABLED, "").strip().lower() == "true"
        return None if off else cls(settings, process)

    def close(self) -> None:
        """Export what is left, as far as that works within seconds."""
        ending = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        ending.start()
        ending.join(_END_SECONDS)

    def drawn(self) -> bool:
        """Whether one more request is traced: drawn here, so that no client decides it."""
        return self._share >= 1 or random.random() < self._share

    def root(self, name: str, *, client: TraceContext | None) -> Spanned:
        """A span for a request; its end is the caller's matter. `client` is what its `traceparent` says."""
        given = client if self.client_context != "ignore" else None
        parent = given if self.client_context == "parent" else None
        links = [Link(_remote(given))] if given is not None and parent is None else []
        span = self._tracer.start_span(name, _under(parent), SpanKind.SERVER, links=links, record_exception=False)
        assert isinstance(span, Span)
        return Spanned(self, names.REQUEST, span)

    @contextlib.contextmanager
    def span(
        self,
        kind: str,
        parent: object,
        attributes: Attributes | None = None,
        *,
        name: str | None = None,
        role: SpanKind = SpanKind.INTERNAL,
    ) -> Iterator[Spanned | None]:
        """A span around what is done in here, which has failed where an exception leaves it. Log lines in here name its
        trace.

        Args:
            kind: which of `names.ATTRIBUTES` it is.
            parent: the context that came with the work; without a valid one there is no span.
        """
        if not _sampled(parent):
            yield None
            return
        with entered(self.start(kind, parent, attributes, name=name, role=role)) as spanned:
            yield spanned

    def start(
        self,
        kind: str,
        parent: object,
        attributes: Attributes | None = None,
        *,
        name: str | None = None,
        role: SpanKind = SpanKind.INTERNAL,
        at: int | None = None,
    ) -> Spanned:
        """As `span`, of which the caller says when it ends. Raises ValueError without a context."""
        place = traceparent.decode(parent)
        if place is None:
            raise ValueError("no context")
        given = _checked(kind, attributes or {})
        span = self._tracer.start_span(name or kind, _under(place), role, given, start_time=at)
        assert isinstance(span, Span)
        return Spanned(self, kind, span)

    def past(
        self,
        kind: str,
        parent: object,
        start: int,
        end: int | None = None,
        attributes: Attributes | None = None,
        *,
        role: SpanKind = SpanKind.INTERNAL,
        failed: str | None = None,
    ) -> None:
        """A span of what is over. Times are nanoseconds of Unix time; `end` is now where it is not given."""
        if not _sampled(parent):
            return
        end = time.time_ns() if end is None else end
        spanned = self.start(kind, parent, attributes, role=role, at=min(start, end))
        if failed is not None:
            spanned.failed(failed)
        spanned.end(end)


@contextlib.contextmanager
def entered(spanned: Spanned) -> Iterator[Spanned]:
    """What is done in here is done in this span, and it ends with it."""
    before = _here.set(spanned)
    try:
        with log.about(trace=spanned.trace_id):
            yield spanned
    except BaseException as error:
        spanned.failed(type(error).__name__)
        raise
    finally:
        _here.reset(before)
        spanned.end()


@contextlib.contextmanager
def step(kind: str, attributes: Attributes | None = None) -> Iterator[Spanned | None]:
    """A span below the one that this is done in; none where there is none."""
    here = _here.get()
    if here is None:
        yield None
        return
    with here.tracing.span(kind, here.context, attributes) as spanned:
        yield spanned


def here() -> Spanned | None:
    """The span that this is done in."""
    return _here.get()


_workers: Tracing | None = None


@contextlib.contextmanager
def opened(settings: TelemetrySettings, process: str) -> Iterator[None]:
    """While this lasts a worker's spans go where the settings say; then what is left is exported.

    Raises SettingsError.
    """
    global _workers
    before, _workers = _workers, Tracing.open(settings, process)
    try:
        yield
    finally:
        ended, _workers = _workers, before
        if ended is not None:
            ended.close()


def of_worker() -> Tracing | None:
    """What a worker's spans are made with, one per process; None where nothing is traced."""
    return _workers


def ago(seconds: float) -> int:
    """So long ago, in nanoseconds of Unix time."""
    return time.time_ns() - int(seconds * 1e9)


def _sampled(context: object) -> bool:
    place = traceparent.decode(context)
    return place is not None and place.sampled


def _checked(kind: str, attributes: Attributes) -> dict[str, Value]:
    allowed = names.ATTRIBUTES[kind]
    assert all(name in allowed for name in attributes), (kind, [*attributes])
    given = {name: value for name, value in attributes.items() if value is not None}
    # A collector refuses a whole batch for one number that is too large.
    return {name: min(value, _LARGEST) if type(value) is int else value for name, value in given.items()}


def _remote(place: TraceContext) -> SpanContext:
    return SpanContext(place.trace_id, place.span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _under(place: TraceContext | None) -> Context:
    # A context of its own: whatever else this process traces is none of ours.
    return Context() if place is None else set_span_in_context(NonRecordingSpan(_remote(place)), Context())
