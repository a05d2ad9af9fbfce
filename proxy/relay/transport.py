"""How a request reaches a backend: one method in, a response to read out. aiohttp is behind it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import aiohttp
from aiohttp.connector import Connection
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from policies.errors import BackendUnavailable, UpstreamFailed
from policies.settings import TimeoutSettings
from proxy.begun import Begun
from proxy.patience import Patience
from proxy.relay.direct import Exchange, Target
from proxy.relay.incoming import Incoming, rest_of
from proxy.relay.passing import Take, read
from proxy.resolver import Resolver

if TYPE_CHECKING:
    from aiohttp.tracing import Trace

Headers = Sequence[tuple[bytes, bytes]]
Ready = Callable[[], Awaitable[None]]
Went = Callable[[], None]
_LARGE = 1024 * 1024
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
_MOST_TARGETS = 1024
_MOST_AFTER = 1024
"""Bytes of a body that may follow its terminal frame, as the end of a coding does."""
_MOST_HEADS = 32
"""Heads of one response, informational ones among them."""


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A POST for a backend. `headers` are complete: the transport adds only `host` and `content-length`."""

    url: str
    headers: Sequence[tuple[str, str]]
    body: bytes


class UpstreamResponse(Protocol):
    """The backend's answer, of which status and headers are known."""

    status: int
    headers: Headers

    async def read(self, take: Take | None = None) -> bytes:
        """Whatever has arrived, at least one byte; `b""` at the end. What arrives while it is waited for is offered to
        `take`, and not returned where that deals with it. Raises UpstreamFailed when it broke off."""

    def when_whole(self, then: Callable[[], None]) -> None:
        """Call it once the last byte has arrived, read or not; maybe at once, and never where it breaks off."""

    def close(self) -> None:
        """Done with it; a connection whose answer was not read to its end is closed."""


class Transport(Protocol):
    """Carries requests to backends. Cancelling a `send` closes its connection.

    Attributes:
        unasked: connections closed because more came than was asked for (see Incoming), or than an answer has.
    """

    unasked: int

    async def send(
        self, request: UpstreamRequest, ready: Ready | None = None, went: Went | None = None
    ) -> UpstreamResponse:
        """`ready` is awaited before a connection is looked for, `went` called when there is one and the request goes
        up; again where it does so a second time.

        Raises BackendUnavailable when no connection came about, UpstreamFailed when it broke before the answer, and
        what `ready` does.
        """

    async def close(self) -> None:
        """Close every connection."""


class AiohttpResponse:
    """An aiohttp response with its body left as it came (not decompressed)."""

    __slots__ = ("_response", "headers", "status")

    def __init__(self, response: aiohttp.ClientResponse | Exchange) -> None:
        self._response = response
        self.status = response.status
        self.headers: Headers = response.headers if isinstance(response, Exchange) else response.raw_headers

    async def read(self, take: Take | None = None) -> bytes:
        """See UpstreamResponse."""
        content = self._response.content
        try:
            return await read(content, take)
        except (aiohttp.ClientError, HttpProcessingError, OSError) as error:
            # aiohttp forgets what came before it broke off.
            if rest := rest_of(content):
                return rest
            # aiohttp raises one and the same exception wherever a closed response is read: its traceback would grow
            # with each of them and keep what their frames hold.
            raise UpstreamFailed("the backend broke off its answer") from error.with_traceback(None)

    def when_whole(self, then: Callable[[], None]) -> None:
        """See UpstreamResponse."""
        self._response.content.on_eof(then)

    def close(self) -> None:
        """See UpstreamResponse. aiohttp returns the connection to its pool by itself at the end of a body."""
        self._response.close()


class AiohttpTransport:
    """Pooled connections without a limit of their own (backends have one), no cookies, no redirects.

    A kept-alive connection that the backend closed just as we used it is replaced silently, once and by a new one, as
    long as not one byte of an answer came.

    Attributes:
        unasked: see Transport.
    """

    def __init__(self, timeouts: TimeoutSettings) -> None:
        self.unasked = 0
        self._targets: dict[str, Target] = {}
        self._pooled = _session(_Connector(timeouts.connect, self._close_one, keepalive_timeout=30))
        self._fresh = _session(_Connector(timeouts.connect, self._close_one, force_close=True))

    async def send(
        self, request: UpstreamRequest, ready: Ready | None = None, went: Went | None = None
    ) -> UpstreamResponse:
        """See Transport."""
        going = _Going(ready, went)
        _going.set(going)
        try:
            return await self._send(self._pooled, request, going)
        except _Stale:
            return await self._send(self._fresh, request, going)
        finally:
            # Whatever was made meanwhile, as timers are, knows this context for as long as it lives.
            going.ready = going.went = None

    async def close(self) -> None:
        """See Transport."""
        await self._pooled.close()
        await self._fresh.close()

    def _target(self, url: str) -> Target:
        target = self._targets.get(url)
        if target is None:
            if len(self._targets) >= _MOST_TARGETS:
                self._targets.clear()
            target = self._targets[url] = Target(_parsed(url), self._pooled)
        return target

    def _close_one(self) -> None:
        self.unasked += 1

    async def _send(self, session: aiohttp.ClientSession, request: UpstreamRequest, going: _Going) -> UpstreamResponse:
        """Raises what `send` does, and _Stale."""
        going.reused = False
        try:
            return await _exchange(session, self._target(request.url), request, going)
        except aiohttp.ClientConnectorError as error:
            raise BackendUnavailable("the backend cannot be reached") from error
        except aiohttp.ServerTimeoutError as error:
            raise BackendUnavailable("the backend cannot be reached in time") from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if going.reused and not _answered(error):
                raise _Stale from _bare(error)
            raise UpstreamFailed("the backend closed the connection before it answered") from _bare(error)
        except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:
            raise UpstreamFailed("the backend's answer is not HTTP") from _bare(error)


class _Going:
    """A request on its way; `reused` says that its connection had carried another one before."""

    __slots__ = ("ready", "reused", "went")

    def __init__(self, ready: Ready | None, went: Went | None) -> None:
        self.ready = ready
        self.went = went
        self.reused = False


_going: ContextVar[_Going] = ContextVar("going")
"""This task's request."""


class _Stale(Exception):
    """The backend closed a kept-alive connection before one byte of an answer."""


class _Connector(aiohttp.TCPConnector):
    """Has `seconds` for a connection, from its name to the end of the handshake, and says of one whether it is a used
    one. aiohttp's tracing does, too, and takes a tenth of a millisecond of every request for it."""

    def __init__(self, seconds: float, unasked: Callable[[], None], **options: Any) -> None:
        super().__init__(limit=0, ttl_dns_cache=30, resolver=Resolver(), **options)
        self._factory = partial(Incoming, self._loop, unasked)  # type: ignore[assignment]
        self._seconds = seconds
        self._used: WeakSet[object] = WeakSet()

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109
    ) -> Any:
        """A connection for a request."""
        going = _going.get()
        ready, going.ready = going.ready, None
        if ready is not None:
            await ready()
        # The name's turn counts, too, which `sock_connect` leaves out; a pooled connection is there at once.
        coming = Begun(super().connect(req, traces, timeout))
        if coming.done:
            connection = coming.result
        else:
            async with Patience(self._seconds):
                connection = await coming
        protocol = connection.protocol
        if protocol in self._used:
            going.reused = True
        else:
            self._used.add(protocol)
        if going.went is not None:
            going.went()
        return connection


class _Response(aiohttp.ClientResponse):
    """Has few heads before its own: aiohttp reads informational ones for as long as they come."""

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        """Read the head. Raises HttpProcessingError where others come without end."""
        protocol = connection.protocol
        assert protocol is not None
        read, left, going = protocol.read, _MOST_HEADS, _going.get()

        async def counted() -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise HttpProcessingError(message="too many informational responses")
            head = await read()
            # Where there was one, informational or not, the request has arrived: it must not go there twice.
            going.reused = False
            return head

        protocol.read = counted  # type: ignore[method-assign]
        try:
            return await super().start(connection)
        finally:
            vars(protocol).pop("read")


def _session(connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        response_class=_Response,
        timeout=_NO_TIMEOUT,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )


async def _exchange(
    session: aiohttp.ClientSession, target: Target, request: UpstreamRequest, going: _Going
) -> AiohttpResponse:
    """Raises what aiohttp does."""
    if not target.simple or len(request.body) >= _LARGE:
        return AiohttpResponse(await _post(session, request))
    data = target.written(request.headers, request.body)
    assert session.connector is not None
    try:
        exchange = Exchange(await session.connector.connect(target.asked, [], _NO_TIMEOUT))
    except TimeoutError as error:
        raise aiohttp.ConnectionTimeoutError("no connection in time") from error
    try:
        await exchange.run(data)
    except BaseException:
        exchange.close()
        raise
    finally:
        if exchange.heads:
            # The request has arrived: it must not go there twice.
            going.reused = False
    return AiohttpResponse(exchange)


async def _post(session: aiohttp.ClientSession, request: UpstreamRequest) -> aiohttp.ClientResponse:
    # aiohttp writes bytes in one go, which for a large body would hold the loop; a file it writes in parts.
    body = request.body if len(request.body) < _LARGE else io.BytesIO(request.body)
    return await session.post(
        _parsed(request.url),
        data=body,
        headers=request.headers,
        allow_redirects=False,
    )


@lru_cache(maxsize=1024)
def _parsed(url: str) -> URL:
    return URL(url, encoded=True)


def _bare(error: BaseException) -> BaseException:
    """The same without where it was raised: its connection keeps it, and it the request and all who wait for it."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


def _answered(error: Exception) -> bool:
    """Whether a part of an answer's head came: aiohttp hands it over with the error, or a text when there is none."""
    return isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str | None)


async def finish(response: UpstreamResponse, seconds: float, *, plain: bool) -> bool:
    """Read the little that may follow a terminal frame, so that the connection can be used again; then close. Returns
    whether more came than may: in a `plain` body, one without a coding, only blank lines."""
    left = _MOST_AFTER
    try:
        async with asyncio.timeout(seconds):
            while data := await response.read():
                left -= len(data)
                if left < 0 or (plain and data.strip()):
                    return True
    except (TimeoutError, UpstreamFailed):
        pass
    finally:
        response.close()
    return False
