"""One request on one of aiohttp's connections, without the layers of its client: what these do for a request is decided
here once for all of a backend's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import aiohttp
from aiohttp import StreamReader
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.helpers import set_exception
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

_MOST_HEADS = 32
"""Heads of one response, informational ones among them."""
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_SWITCHING = 101


class Target:
    """An address that requests are sent to.

    Attributes:
        asked: a request as a connector wants to see one; never sent.
        simple: nothing but a connection comes of the address. One with a name and a password in it says more.
    """

    __slots__ = ("_head", "asked", "simple")

    def __init__(self, url: URL, session: aiohttp.ClientSession) -> None:
        self.asked = aiohttp.ClientRequest("POST", url, loop=session._loop, session=session, response_class=None)
        self.simple = url.user is None and url.password is None
        self._head = b"POST %b HTTP/1.1\r\nHost: %b\r\n" % (
            url.raw_path_qs.encode(),
            self.asked.headers["Host"].encode(),
        )

    def written(self, headers: Sequence[tuple[str, str]], body: bytes) -> bytes:
        """A POST as it goes to the socket. Raises ValueError where a header would be two."""
        lines = [f"{name}: {value}".encode() for name, value in headers]
        if any(map(_CONTROL.search, lines)):
            raise ValueError("a header has characters that it cannot have")
        return b"%b%b\r\nContent-Length: %d\r\n\r\n%b" % (self._head, b"\r\n".join(lines), len(body), body)


class Exchange:
    """What came on a connection for a request. At the end of its body the connection goes back to its pool."""

    __slots__ = ("_connection", "_whole", "content", "headers", "heads", "status")

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: Sequence[tuple[bytes, bytes]] = ()
        self.heads = 0
        self.content: StreamReader
        self._connection = connection
        self._whole = False

    async def run(self, data: bytes) -> None:
        """Send it and read the answer's head. Raises what aiohttp does; HttpProcessingError, too, where informational
        heads come without end. `heads` tells how many came."""
        protocol = self._connection.protocol
        assert protocol is not None
        protocol.set_response_params(read_until_eof=True, auto_decompress=False)
        _write(protocol, data)
        while True:
            message, content = await protocol.read()
            self.heads += 1
            if message.code >= 200 or message.code == _SWITCHING:
                break
            if self.heads >= _MOST_HEADS:
                raise HttpProcessingError(message="too many informational responses")
        self.status, self.headers, self.content = message.code, message.raw_headers, content
        content.on_eof(self._over)

    def close(self) -> None:
        """Done with it. A connection whose answer was not read to its end is closed."""
        if not self._whole and self.status and self.content.exception() is None:
            set_exception(self.content, aiohttp.ClientConnectionError("closed"))
        self._connection.close()

    def _over(self) -> None:
        protocol = self._connection.protocol
        if protocol is None or not protocol.upgraded:
            self._whole = True
            self._connection.release()


def _write(protocol: ResponseHandler, data: bytes) -> None:
    transport = protocol.transport
    if transport is None or transport.is_closing():
        raise aiohttp.ClientConnectionResetError("the connection is closing")
    transport.write(data)
