"""Sockets on which the proxy listens, bound before anything else starts."""

from __future__ import annotations

import errno
import socket

from policies.errors import CountersignError, SettingsError


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
