"""The proxy's own endpoints: models, verifications, health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from policies.errors import AuthenticationFailed, BackendUnavailable, KeysUnavailable, NotFound
from policies.verification import public
from proxy.api.auth import Client
from proxy.metrics import CONTENT_TYPE
from proxy.services import Services, header_map
from verifier_pool.link.exposition import bears

LONGEST_WAIT = 120.0
"""Seconds a client may wait for a verdict in one call."""

router = APIRouter()
_STARTED = int(time.time())


def services_of(request: Request) -> Services:
    """The running proxy's parts."""
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


async def client_of(request: Request, services: Annotated[Services, Depends(services_of)]) -> Client:
    """Who is asking. Raises AuthenticationFailed and KeysUnavailable."""
    return await services.keys.authenticate(header_map(request.scope["headers"]), request.scope["client"])


TheServices = Annotated[Services, Depends(services_of)]
TheClient = Annotated[Client, Depends(client_of)]


@router.get("/v1/models")
async def models(services: TheServices, client: TheClient) -> dict[str, Any]:
    """Models that have a backend which may serve clients."""
    return {"object": "list", "data": [_model(services, name) for name in services.backends.served_models()]}


@router.get("/v1/models/{name:path}")
async def model(name: str, services: TheServices, client: TheClient) -> dict[str, Any]:
    """One model; 503 while none of its backends may serve clients."""
    if name in services.backends.known_models() and name not in services.backends.served_models():
        raise BackendUnavailable("no backend of this model is available; try again later")
    if name not in services.backends.served_models():
        raise NotFound(f"the model {name[:200]!r} does not exist", param="model", code="model_not_found")
    return _model(services, name)


@router.get("/v1/verifications/{id}")
async def verification(
    id: str,
    services: TheServices,
    client: TheClient,
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT, allow_inf_nan=False)] = 0.0,
) -> dict[str, Any]:
    """The verification of one response, for the key that made the request and nobody else.

    `wait` is how many seconds to wait for the verdict; without one by then the status is `pending`. An outage of Redis
    that is over by then is waited for, too.
    """
    return public(await services.store.told(id, client.owner, wait))


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process lives."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(services: TheServices, response: Response) -> dict[str, Any]:
    """Whether requests can be served: a backend is configured and the process is not on its way out.

    Without Redis requests are served too, unverified; the body says so. Where no backend may serve clients they get
    errors, and the process is ready all the same: it is also how the operator pardons one.
    """
    backends = services.backends.all
    ready = bool(backends) and not services.drain.draining
    response.status_code = 200 if ready else 503
    if not ready:
        status = "draining" if services.drain.draining else "no backend"
    else:
        status = "ready" if services.backends.served_models() else "no backend available"
    return {"status": status, "redis": "down" if services.outage.down else "up", "backends": len(backends)}


@router.get("/metrics")
async def metrics(request: Request, services: TheServices) -> Response:
    """Prometheus text; what is thought of backends is on it for admins, and for whoever bears `metrics.token`.

    It is made in a thread, and asks Redis there: no stream waits for it.
    """
    private = bears(request.headers.get("authorization"), services.settings.metrics.token)
    if not private:
        with contextlib.suppress(AuthenticationFailed, KeysUnavailable):
            private = (await client_of(request, services)).admin
    page = await asyncio.to_thread(services.metrics.page, private=private)
    return Response(page, media_type=CONTENT_TYPE)


def _model(services: Services, name: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": name, "object": "model", "created": _STARTED, "owned_by": "countersign"}
    if (longest := services.settings.models[name].max_model_len) is not None:
        entry["max_model_len"] = longest
    return entry
