"""Parts of aiohttp that are no promise of its, which `proxy/relay/{passing,direct,incoming,transport}.py` use: by name,
so that another aiohttp says here what it lacks, and not by a stream that stands still."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import aiohttp
import aiohttp.connector
import aiohttp.helpers
import aiohttp.http_exceptions
from aiohttp import StreamReader
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from proxy.relay.incoming import Incoming
from proxy.relay.passing import Passing

_BODY = ("_protocol", "_buffer", "_eof", "_cursor", "total_bytes", "_read_nowait", "readany", "on_eof", "is_eof")
_READER = ("feed_data", "end_http_chunk_receiving", "set_exception", "exception")
_CONNECTION = ("transport", "upgraded", "set_response_params", "read", "data_received", "feed_data", "set_exception")
_CLOSING = ("force_close", "close", "_parser", "__dict__")


def _lacks(of: str, it: object, names: tuple[str, ...]) -> list[str]:
    return [f"{of}.{name}" for name in names if not hasattr(it, name)]


def _takes(of: str, call: Callable[..., Any], *given: object, **options: object) -> list[str]:
    """Whether it can be called so; `given` are arguments in the place of its own."""
    try:
        inspect.signature(call).bind(*given, **options)
    except TypeError as error:
        return [f"{of}: {error}"]
    return []


def test_what_the_relay_uses_of_aiohttp_is_there() -> None:
    async def found() -> list[str]:
        loop = asyncio.get_running_loop()
        protocol = ResponseHandler(loop)
        reader = StreamReader(protocol, 2**16, loop=loop)
        async with aiohttp.ClientSession() as session:
            request = aiohttp.ClientRequest("POST", URL("http://b/v1"), loop=loop, session=session, response_class=None)
            connector = session.connector
            return [
                *_lacks("StreamReader", reader, (*_BODY, *_READER)),
                *_lacks("ResponseHandler", protocol, (*_CONNECTION, *_CLOSING)),
                *_lacks("ClientSession", session, ("_loop",)),
                *_lacks("ClientRequest", request, ("headers",)),
                *([] if "Host" in request.headers else ["ClientRequest.headers['Host']"]),
                *_lacks("TCPConnector", connector, ("_factory", "_loop", "connect")),
                *_lacks("Connection", aiohttp.connector.Connection, ("protocol", "release", "close")),
                *_lacks("helpers", aiohttp.helpers, ("set_exception",)),
                *_lacks("http_exceptions", aiohttp.http_exceptions, ("HttpProcessingError",)),
                *_lacks("ClientResponse", aiohttp.ClientResponse, ("start",)),
                *_takes("StreamReader.feed_data", reader.feed_data, b"", 0),
                *_takes("ResponseHandler.feed_data", protocol.feed_data, (None, reader), 0),
                *_takes("ResponseHandler.set_exception", protocol.set_exception, OSError(), OSError()),
                *_takes(
                    "ResponseHandler.set_response_params",
                    protocol.set_response_params,
                    read_until_eof=True,
                    auto_decompress=False,
                ),
                *_takes("TCPConnector.connect", connector.connect if connector else print, request, [], None),
            ]

    missing = asyncio.run(found())
    assert not missing, f"aiohttp {aiohttp.__version__} lacks what proxy/relay uses of it: {', '.join(missing)}"


def test_a_reader_can_become_ours_while_it_is_read() -> None:
    """`passing.read` changes its class, which works as long as both are laid out alike; and what the parser feeds must
    come by our methods then."""

    async def fed() -> list[bytes]:
        protocol = Incoming(asyncio.get_running_loop(), lambda: None)
        protocol.connection_made(_Transport())
        protocol.set_response_params(read_until_eof=True, auto_decompress=False)
        protocol.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        _, content = await protocol.read()
        assert type(content) is StreamReader, f"aiohttp {aiohttp.__version__} reads bodies by {type(content)}"
        content.__class__ = Passing
        taken: list[bytes] = []

        def take(data: bytes) -> bool:
            taken.append(data)
            return True

        protocol.take = take  # type: ignore[attr-defined]
        protocol.data_received(b"2\r\nab\r\n3\r\ncde\r\n")
        return taken

    taken = asyncio.run(fed())
    assert taken == [b"ab", b"cde"], f"aiohttp {aiohttp.__version__} feeds bodies another way"


class _Transport(asyncio.Transport):
    """Goes nowhere."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return False
