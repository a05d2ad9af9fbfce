"""Which process says something, as OpenTelemetry wants it: the same for metrics and traces."""

from __future__ import annotations

import os
import socket
from importlib import metadata

from opentelemetry.sdk.resources import Resource

from policies.settings import TelemetrySettings


def resource_of(settings: TelemetrySettings, process: str) -> Resource:
    """This process. `process` is what it is: `proxy`, `worker`, `verify`, `replay` or `webhooks`."""
    return Resource.create(
        {
            "service.name": settings.service_name,
            "service.version": metadata.version("countersign"),
            "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
            "countersign.process": process,
        }
    )
