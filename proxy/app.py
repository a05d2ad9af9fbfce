"""The ASGI application: the relayed endpoints, our own, and one shape for every error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from policies.settings import Settings
from proxy.admin.app import serving
from proxy.api import backends, errors, evidence, keys, receipts, routes, webhooks
from proxy.drain import Drain
from proxy.following import Following
from proxy.listening import listen
from proxy.relay.attempt import PATHS
from proxy.relay.endpoint import RelayEndpoint
from proxy.services import Services, check_addresses, load_tokenizers
from proxy.tracing import TracedEndpoint
from verifier_pool.link.settings_file import SettingsFile
from verifier_pool.link.telemetry.exporters import check_traces


class _App(FastAPI):
    """FastAPI, except that what is relayed does not pass through its layers, which cost as much as the relay itself."""

    relayed: Mapping[str, ASGIApp] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        endpoint = self.relayed.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        await endpoint(scope, receive, send)


def create_app(
    settings: Settings,
    redis_url: str,
    drain: Drain | None = None,
    *,
    file: SettingsFile | None = None,
    given: Mapping[str, Any] | None = None,
) -> FastAPI:
    """The proxy as an ASGI application; its services live as long as its lifespan. Raises SettingsError
    and, where the admin API's port is in use, CountersignError.

    Args:
        file: where the settings are from; changes of it are followed.
        given: settings that hold whatever the file says.

    The admin API is not part of it: it has a port of its own (`proxy.admin`), bound here. Where there is one,
    `state.admin` is its address, and the public port serves nothing of it.
    """
    check_addresses(settings, redis_url)
    tokenizers = load_tokenizers(settings)
    check_traces(settings.telemetry)

    own = settings.admin
    listening = None if own.port is None else listen(own.host, own.port, "admin.host")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.services = await Services.start(settings, redis_url, tokenizers, drain or Drain())
        app.state.following = following = Following(app.state, settings, redis_url, file, given or {})
        try:
            await following.start()
            async with serving(following, redis_url, settings, listening):
                yield
        finally:
            await following.close()
            await app.state.services.stop()

    relayed = {path: RelayEndpoint(name) for name, path in PATHS.items()}
    relayed |= {path: RelayEndpoint(path) for path in settings.relay.passthrough}
    app = _App(
        title="Countersign",
        lifespan=lifespan,
        openapi_url=None,
        redirect_slashes=False,
        routes=[Route(path, endpoint, methods=["POST"]) for path, endpoint in relayed.items()],
    )
    served: dict[str, ASGIApp] = {
        path: ServerErrorMiddleware(endpoint, errors.unexpected) for path, endpoint in relayed.items()
    }
    if settings.telemetry.traces != "none":
        served = {path: TracedEndpoint(app, relayed[path].name, path) for path, app in served.items()}
    app.relayed = served
    app.include_router(routes.router)
    app.include_router(receipts.router)
    app.include_router(evidence.router)
    app.include_router(webhooks.router, prefix="/v1/webhooks")
    app.state.admin = None if listening is None else listening.getsockname()[:2]
    if listening is None:
        app.include_router(backends.router)
        app.include_router(keys.router, prefix="/v1/keys")
    errors.install(app)
    return app
