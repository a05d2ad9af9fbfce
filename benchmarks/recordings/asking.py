"""One request to one server, through the proxy's own code, with the evidence of its answer."""

from __future__ import annotations

import http.client
import secrets
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

import orjson

from policies.errors import CountersignError
from policies.evidence import Endpoint, Evidence
from policies.settings import BackendSettings, ModelSettings
from proxy.relay.body import Body
from proxy.tap.factory import open_tap
from proxy.tap.prepare import prepare
from proxy.tap.types import Prepared

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class AskError(CountersignError):
    """The server did not give a usable answer; the message says what came instead."""


def ask(
    backend: BackendSettings,
    model: ModelSettings,
    fields: Mapping[str, Any],
    *,
    seed: int | None = None,
    endpoint: Endpoint = "chat",
    timeout: float = 600.0,
) -> list[Evidence]:
    """The evidence of every choice of one answer.

    Args:
        fields: the request as a client would write it; the model is filled in.
        seed: used where `fields` names none; fresh by default.
        timeout: seconds.

    Raises:
        AskError: no connection, a status other than 200, or an answer without a choice.
    """
    body = orjson.dumps({"model": backend.model, **fields})
    prepared = prepare(
        Body.read(endpoint, body), model, backend, seed=secrets.randbelow(2**62) if seed is None else seed
    )
    try:
        status, kind, raw = post(backend.url, PATHS[endpoint], prepared.body, headers_for(backend), timeout)
    except (OSError, http.client.HTTPException) as error:
        raise AskError(f"{backend.name} cannot be reached: {error}") from error
    choices = evidence_of(prepared, backend, raw, status=status, kind=kind)
    if status != 200 or not choices:
        raise AskError(f"{backend.name} answered with status {status} and {len(choices)} choices")
    return choices


def headers_for(backend: BackendSettings) -> dict[str, str]:
    """Headers of a JSON request to a backend, with its key."""
    headers = {"content-type": "application/json"}
    if backend.api_key is not None:
        headers["authorization"] = f"Bearer {backend.api_key.get_secret_value()}"
    return headers


def evidence_of(
    prepared: Prepared, backend: BackendSettings, raw: bytes, *, status: int, kind: str, seconds: float | None = None
) -> list[Evidence]:
    """What the tap makes of a whole answer's bytes; `kind` is their media type, `seconds` how long they took."""
    tap = open_tap(prepared, backend.model, status=status, content_type=kind)
    tap.feed(raw)
    tap.close()
    return tap.evidence(
        id=secrets.token_hex(16),
        backend=backend.name,
        model=backend.model,
        runtime=backend.runtime,
        precision=backend.precision,
        engine=backend.engine,
        speculative=backend.speculative,
        request=prepared.body,
        created=time.time(),
        total_seconds=seconds,
    )


def post(url: str, path: str, body: bytes, headers: Mapping[str, str], timeout: float) -> tuple[int, str, bytes]:
    """Status, media type and body of one POST; `timeout` in seconds. Raises OSError and HTTPException."""
    parts = urllib.parse.urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(host, port, timeout=timeout)
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    try:
        connection.request("POST", prefix + path, body, dict(headers))
        response = connection.getresponse()
        media = response.getheader("content-type", "").partition(";")[0].strip()
        return response.status, media, response.read()
    finally:
        connection.close()
