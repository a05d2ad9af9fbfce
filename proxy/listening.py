"""Sockets on which the proxy listens, bound before anything else starts, and how they are served."""

from __future__ import annotations

import errno
import socket

import uvicorn
from starlette.types import ASGIApp

from policies.errors import CountersignError, SettingsError
from policies.settings import Settings
from proxy.uptake import watched


def listen(host: str, port: int, key: str) -> socket.socket:
    """A listening socket. `key` is the setting that names the host.

    Raises SettingsError for an address that is not this machine's, CountersignError for a port that is in use.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise SettingsError(key, f"an address of this machine, not {host!r}") from error
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise CountersignError(f"port {port} on {host} {reason}") from error
    return listening


def uvicorn_config(
    app: ASGIApp, settings: Settings, *, lifespan: bool, keep_alive: int, shutdown: int
) -> uvicorn.Config:
    """How uvicorn serves an application, on whichever port.

    Args:
        lifespan: whether it has one.
        keep_alive: seconds that a connection may be idle. `shutdown`: seconds for what still runs at the end.
    """
    return uvicorn.Config(
        app,
        http=watched(settings),
        loop="uvloop",
        ws="none",
        lifespan="on" if lifespan else "off",
        log_config=None,
        access_log=False,
        server_header=False,
        # Without keys the peer's address decides; a header must not be able to change it.
        proxy_headers=False,
        timeout_keep_alive=keep_alive,
        timeout_graceful_shutdown=shutdown,
    )
