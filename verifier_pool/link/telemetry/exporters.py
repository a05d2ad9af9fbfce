"""Where spans go: to a collector, or as JSON lines to a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import orjson
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from policies.errors import SettingsError
from policies.settings import TelemetrySettings

_SECONDS = 5.0
"""For one request to the collector, its repetitions included; a process that ends waits for the last one."""


def open_exporter(settings: TelemetrySettings) -> SpanExporter:
    """The exporter of these settings. Raises SettingsError where it cannot work."""
    if settings.traces == "file":
        assert settings.file is not None
        return FileExporter(settings.file)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    try:
        return OTLPSpanExporter(endpoint=settings.endpoint, timeout=_SECONDS)
    except (ValueError, OSError) as error:
        raise SettingsError("telemetry.traces", "usable values in the OTEL_EXPORTER_OTLP_… variables") from error


def check_traces(settings: TelemetrySettings) -> None:
    """Raises SettingsError where spans cannot be exported at all."""
    if settings.traces != "none":
        open_exporter(settings).shutdown()


class FileExporter(SpanExporter):  # type: ignore[misc]
    """Appends one JSON object per span to a file, which several processes may share, and which may be moved away at any
    time (logrotate): it is opened for each batch.

    Ids are hexadecimal, as in a `traceparent`; times are nanoseconds of Unix time.

    Raises SettingsError where the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._write(b"")
        except OSError as error:
            raise SettingsError(
                "telemetry.file", f"a file that can be written, not {path!r} ({error.strerror})"
            ) from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append them; those that cannot be written are lost."""
        try:
            self._write(b"".join(orjson.dumps(_document(span)) + b"\n" for span in spans))
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def _write(self, data: bytes) -> None:
        # One write at the file's end is whole, however many processes do so.
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while data:
                data = data[os.write(file, data) :]
        finally:
            os.close(file)


def _document(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None
    return {
        "trace": f"{context.trace_id:032x}",
        "span": f"{context.span_id:016x}",
        "parent": None if span.parent is None else f"{span.parent.span_id:016x}",
        "name": span.name,
        "kind": span.kind.name.lower(),
        "start": span.start_time,
        "end": span.end_time,
        "failed": not span.status.is_ok and not span.status.is_unset,
        "attributes": dict(span.attributes or {}),
        "events": [
            {"name": each.name, "time": each.timestamp, "attributes": dict(each.attributes or {})}
            for each in span.events
        ],
        "links": [f"{each.context.trace_id:032x}-{each.context.span_id:016x}" for each in span.links],
        "resource": dict(span.resource.attributes),
    }
