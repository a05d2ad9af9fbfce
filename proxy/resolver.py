"""Names of backends, looked up where a name server that does not answer holds up nobody else."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence

from aiohttp.abc import AbstractResolver, ResolveResult

_NUMERIC = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
_Found = tuple[socket.AddressFamily, str]
_Wanted = tuple[str, socket.AddressFamily]


class Resolver(AbstractResolver):
    """The machine's own resolver, in a thread for each name that is being looked up.

    An event loop's own has few threads for everybody: a handful of names that hang there keep Redis, and every other
    name, from being found. Here whoever asks for a name that is being looked up already waits with the others, so
    there are never more threads than names of backends; and a thread that hangs keeps no process from ending.
    """

    def __init__(self) -> None:
        self._asked: dict[_Wanted, asyncio.Future[Sequence[_Found]]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Addresses of a host. Raises OSError. Who is cancelled leaves the question to the others."""
        wanted = (host, family)
        asked = self._asked.get(wanted)
        if asked is None:
            asked = self._asked[wanted] = asyncio.get_running_loop().create_future()
            # Its error is nobody's matter when nobody waits any more.
            asked.add_done_callback(lambda done: done.cancelled() or done.exception())
            threading.Thread(target=self._look_up, args=(wanted, asked), name="resolver", daemon=True).start()
        return [
            ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=_NUMERIC)
            for kind, address in await asyncio.shield(asked)
        ]

    async def close(self) -> None:
        """Nothing has to be closed."""

    def _look_up(self, wanted: _Wanted, asked: asyncio.Future[Sequence[_Found]]) -> None:
        found: Sequence[_Found] | OSError
        try:
            found = _addresses(*wanted)
        except OSError as error:
            found = error
        except UnicodeError as error:
            found = OSError(f"no name of a host ({error})")
        try:
            asked.get_loop().call_soon_threadsafe(self._tell, wanted, asked, found)
        except RuntimeError:
            # The loop is closed: nobody is left to be told.
            return

    def _tell(
        self, wanted: _Wanted, asked: asyncio.Future[Sequence[_Found]], found: Sequence[_Found] | OSError
    ) -> None:
        del self._asked[wanted]
        if asked.done():
            return
        if isinstance(found, OSError):
            asked.set_exception(found)
        else:
            asked.set_result(found)


def _addresses(host: str, family: socket.AddressFamily) -> list[_Found]:
    rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, family=family, flags=socket.AI_ADDRCONFIG)
    # With its scope, where it has one; numbers are not looked up.
    return [
        (kind, socket.getnameinfo(at, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]) for kind, _, _, _, at in rows
    ]
