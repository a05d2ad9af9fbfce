"""Metrics on their way to an OpenTelemetry collector: what Prometheus reads, as sums since the start."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from policies.settings import MetricsSettings
from verifier_pool.link.meters import Family, Point, Spread, Values

logger = logging.getLogger(__name__)

_SECONDS = 3.0
"""For one request to the collector; a process that ends waits for the last one."""
_SCOPE = InstrumentationScope("countersign")


class Sender:
    """Sends what `read` says every `settings.every` seconds, from a thread of its own, and once more at the end.

    Args:
        resource: who says it (`telemetry.resource`).
        exporter: in place of OTLP by HTTP.
    """

    def __init__(
        self,
        settings: MetricsSettings,
        read: Callable[[], Sequence[Family]],
        resource: Resource,
        *,
        exporter: MetricExporter | None = None,
    ) -> None:
        self._read = read
        self._every = settings.every
        self._exporter = exporter or _exporter(settings)
        self._began = time.time_ns()
        self._resource = resource
        self._well = True
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send a last time and end."""
        self._ended.set()
        self._thread.join(_SECONDS + 1.0)
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            self._send()
        self._send()

    def _send(self) -> None:
        try:
            data = self.document(self._read())
            well = self._exporter.export(data, timeout_millis=1000 * _SECONDS) is MetricExportResult.SUCCESS
        except Exception as error:  # whatever a library makes of a collector that is odd, metrics end no process
            logger.warning("metrics cannot be sent: %s", type(error).__name__)
            well = False
        if well != self._well:
            logger.warning("the collector takes metrics again" if well else "the collector takes no metrics")
        self._well = well

    def document(self, families: Sequence[Family]) -> MetricsData:
        """What is sent."""
        now = time.time_ns()
        metrics = [_metric(family, self._began, now) for family in families if family.points]
        scope = ScopeMetrics(_SCOPE, metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])


def _exporter(settings: MetricsSettings) -> MetricExporter:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter(endpoint=settings.endpoint, timeout=_SECONDS)


def _metric(family: Family, began: int, now: int) -> Metric:
    points = [_point(family, values, point, began, now) for values, point in family.points.items()]
    since_start = AggregationTemporality.CUMULATIVE
    data: Sum | Gauge | Histogram
    match family.kind:
        case "counter":
            data = Sum(points, since_start, is_monotonic=True)
        case "gauge":
            data = Gauge(points)
        case "histogram":
            data = Histogram(points, since_start)
    return Metric(family.name, family.help, family.unit, data)


def _point(family: Family, values: Values, point: Point, began: int, now: int) -> Any:
    labels = {name: value for name, value in zip(family.labels, values, strict=True) if value}
    if not isinstance(point, Spread):
        return NumberDataPoint(labels, began, now, point)
    count = sum(point.counts)
    # Nobody keeps the least and the largest; the bounds say as much.
    return HistogramDataPoint(
        labels, began, now, count, point.sum, point.counts, family.bounds, float("nan"), float("nan")
    )
