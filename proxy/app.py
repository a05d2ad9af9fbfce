"""The ASGI application: the relayed endpoints, our own, and one shape for every error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.routing import Route

from policies.settings import Settings
from proxy.api import backends, errors, keys, routes
from proxy.relay.attempt import PATHS
from proxy.relay.endpoint import RelayEndpoint
from proxy.services import Drain, Services, check_addresses, load_tokenizers


def create_app(settings: Settings, redis_url: str, drain: Drain | None = None) -> FastAPI:
    """The proxy as an ASGI application; its services live as long as its lifespan. Raises SettingsError."""
    check_addresses(settings, redis_url)
    tokenizers = load_tokenizers(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        services = await Services.start(settings, redis_url, tokenizers, drain or Drain())
        app.state.services = services
        try:
            yield
        finally:
            await services.stop()

    app = FastAPI(
        title="Countersign",
        lifespan=lifespan,
        openapi_url=None,
        redirect_slashes=False,
        routes=[
            Route(PATHS["chat"], RelayEndpoint("chat"), methods=["POST"]),
            Route(PATHS["completions"], RelayEndpoint("completions"), methods=["POST"]),
            *(Route(path, RelayEndpoint(path), methods=["POST"]) for path in settings.relay.passthrough),
        ],
    )
    app.include_router(routes.router)
    app.include_router(backends.router)
    app.include_router(keys.router)
    errors.install(app)
    return app
