"""The admin API as an ASGI application, and the server that runs it beside the proxy's own, on its own port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator, MutableMapping
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI
from starlette.types import Receive, Scope, Send

from policies.settings import Settings
from proxy.admin import backends, pool, settings
from proxy.admin.asking import Desk, TheAdmin, admin_of
from proxy.admin.auth import AdminKeys
from proxy.admin.hands import Hands
from proxy.api import errors, keys, routes, webhooks
from proxy.api.auth import Client
from proxy.following import Following
from proxy.listening import uvicorn_config
from proxy.services import Services

logger = logging.getLogger(__name__)

_KEEP_ALIVE_SECONDS = 30
_SHUTDOWN_SECONDS = 2


class _App(FastAPI):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; nothing of it may be kept by anybody on the way."""

        async def told(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"cache-control", b"no-store")]
            await send(message)

        await super().__call__(scope, receive, told)


def create_admin(desk: Desk) -> FastAPI:
    """The admin API of a running proxy."""
    app = _App(title="Countersign admin", openapi_url=None, redirect_slashes=False)
    app.state.desk = desk
    for each in (settings.router, backends.router, pool.router):
        app.include_router(each)
    app.include_router(keys.router, prefix="/admin/keys", dependencies=[Depends(admin_of)])
    app.include_router(webhooks.router, prefix="/admin/webhooks", dependencies=[Depends(admin_of)])

    def services() -> Services:
        return desk.services

    def client(admin: TheAdmin) -> Client:
        return Client("", admin.name, admin=True, operator=True, known_as=admin.actor)

    # The endpoints for client keys are the proxy's own; who asks is an admin here.
    app.dependency_overrides[routes.services_of] = services
    app.dependency_overrides[routes.client_of] = client
    app.add_api_route("/healthz", routes.healthz)
    errors.install(app)
    return app


class AdminServer:
    """Runs the admin API on the event loop of the proxy, from `start` to `close`: also while the proxy drains."""

    def __init__(self, desk: Desk, running: Settings, listening: socket.socket) -> None:
        config = uvicorn_config(
            create_admin(desk), running, lifespan=False, keep_alive=_KEEP_ALIVE_SECONDS, shutdown=_SHUTDOWN_SECONDS
        )
        self._server = _Server(config)
        self._listening = listening
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        host, port = self._listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        logger.info("the admin API listens", extra={"url": f"http://{shown}:{port}"})
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listening]))

    async def close(self) -> None:
        """End, once requests under way are over."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


class _Server(uvicorn.Server):
    """Signals are the proxy's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(
    following: Following, redis_url: str, running: Settings, listening: socket.socket | None
) -> AsyncIterator[None]:
    """The admin API is served meanwhile, where there is a socket for it."""
    if listening is None:
        yield
        return
    desk = Desk(following, Hands(redis_url, running.durability), AdminKeys())
    server = AdminServer(desk, running, listening)
    server.start()
    try:
        yield
    finally:
        await server.close()
        desk.hands.close()
