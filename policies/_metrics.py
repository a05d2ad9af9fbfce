"""The section of the settings about the numbers that proxy and workers tell of themselves."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, SecretStr, model_validator

from policies._sections import Section

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class MetricsSettings(Section):
    """Where Prometheus reads them, and whether they are sent to a collector as well.

    Attributes:
        token: shows its bearer every metric, at the proxy's `/metrics` too, and nothing else: an admin key sees as
            much and may do more. Without one a worker shows its page to this machine only.
        host: address at which a worker shows `/metrics`; one that other machines can reach needs a `token`.
        port: the page's port; without one there is no page. Each process of a machine needs one of its own; those that
            `--processes` starts share their parent's.
        otlp: all of it is sent to an OpenTelemetry collector, by HTTP. Headers for it, which hold secrets, come from
            `OTEL_EXPORTER_OTLP_HEADERS` alone.
        endpoint: the collector's URL for metrics, such as `http://collector:4318/v1/metrics`; without one
            `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT` says it.
        every: seconds between two sendings.
    """

    token: SecretStr | None = Field(None, min_length=16)
    host: str = "127.0.0.1"
    port: int | None = Field(None, ge=0, lt=65536)
    otlp: bool = False
    endpoint: Annotated[str, Field(pattern=r"^https?://[^@\s]+$")] | None = None
    every: float = Field(30.0, ge=1)

    @model_validator(mode="after")
    def _is_protected(self) -> MetricsSettings:
        if self.port is not None and self.host not in _LOOPBACK and self.token is None:
            raise ValueError("token is needed where other machines can read a worker's metrics")
        return self
