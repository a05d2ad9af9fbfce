"""The section of the settings about what the processes tell of themselves: traces and logs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from policies._sections import Section


class TelemetrySettings(Section):
    """What proxy and workers tell the operator of their work; never a prompt, an answer or a key.

    Attributes:
        traces: where spans go: nowhere, to an OpenTelemetry collector (`otlp`, by HTTP), or to a `file` as JSON lines.
            Headers for a collector, which hold secrets, come from `OTEL_EXPORTER_OTLP_HEADERS` alone.
        endpoint: the collector's URL for traces, such as `http://collector:4318/v1/traces`; without one
            `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT` says it.
        file: path that spans are appended to; processes of one machine may share it.
        sampling: share of requests that are traced, drawn by the proxy itself: no client can ask for it.
        service_name: as spans and metrics name the product; its processes have `countersign.process` beside it.
        client_context: what a client's own `traceparent` does to the trace of its request: nothing (`ignore`), it is
            linked to (`link`), or the trace goes on there (`parent`), which is for clients of one's own: whoever
            chooses the trace's id can put any number of requests into one trace.
        log_level: of the product's own loggers. Libraries are heard from warnings up.
        log_texts: log what libraries and exceptions say as it is, to look into a fault: either may quote prompts,
            answers and keys. Without it a library's line is its fixed words, an exception its type and place.
    """

    traces: Literal["none", "otlp", "file"] = "none"
    endpoint: Annotated[str, Field(pattern=r"^https?://[^@\s]+$")] | None = None
    file: str | None = None
    sampling: float = Field(1.0, ge=0, le=1)
    service_name: str = Field("countersign", min_length=1, max_length=128)
    client_context: Literal["ignore", "link", "parent"] = "link"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_texts: bool = False

    @model_validator(mode="after")
    def _has_file(self) -> TelemetrySettings:
        if self.traces == "file" and not self.file:
            raise ValueError("file is needed for traces: file")
        return self
