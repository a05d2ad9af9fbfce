"""Uvicorn's HTTP protocol within bounds: no endless or trickling heads, one meaning per request, errors as JSON."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from policies.errors import (
    ApiError,
    BackendUnavailable,
    HeadersTooLarge,
    InvalidRequest,
    RequestTimeout,
    RequestTooLarge,
    UnsupportedMedia,
    UnsupportedTransfer,
    UriTooLong,
)
from policies.settings import BoundsSettings
from proxy import http10
from proxy.drain import BREAK_OFF
from proxy.relay.asgi import LINGER_SECONDS, refuse_body
from proxy.relay.downlink import PASS_ON, PassOn
from proxy.tap.rawjson import write

_PER_HEADER = 4
"""Bytes of a header that are neither its name nor its value."""

_BODIED = (b"content-length", b"transfer-encoding")
_VERSIONS = ("1.0", "1.1")
_MOST_PIPELINED = 64
"""Requests of one connection that wait for the one before them."""
_LARGE_PIPELINED = 64 * 1024
"""Bytes of a body that may wait. More would have to stay unread, and behind it nobody sees that the client leaves."""


class BoundedProtocol(HttpToolsProtocol):
    """One client's connection.

    Whatever uvicorn itself would answer in plain text is an OpenAI-shaped error here. A second Host, or none, is
    refused; what the parser refuses already (both lengths, two lengths, folded headers, NUL) stays refused. Trailers
    are dropped: nobody may add to a head that was already decided upon. Together they, or what a chunk says beside its
    length, or blank lines, may be as long as a head: the parser keeps a part of them until it ends.

    Whoever was answered before its body was whole has as long for the rest of it as for a head.
    """

    bounds = BoundsSettings()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._heading = self._bodying = self._over = False
        self._head = self._fed = 0
        self._refusal: ApiError | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._served: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connects."""
        super().connection_made(transport)
        if len(self.connections) > self.bounds.connections:
            self._refuse(BackendUnavailable("too many connections; try again soon", code="too_many_connections"))
        else:
            self._wait_for_a_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._be_patient(False)
        # Uvicorn forgets this one after a reset, and with it keeps everything of the connection until it rings.
        self._unset_keepalive_if_required()
        # Uvicorn tells only the newest request, which may still wait for the one that is served.
        self._tell_that_it_is_over()
        super().connection_lost(exc)
        # Each of these knows the connection: all would stay until garbage is collected.
        self._served = None
        self.cycle = self.scope = None  # type: ignore[assignment]
        self.pipeline.clear()

    def break_off(self) -> None:
        """The answer that is on its way ends here. What was sent goes out, and no end of the answer follows."""
        self._tell_that_it_is_over()
        if isinstance(self._served, http10.UntilClosed):
            http10.reset(self.transport)
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._over:
            return
        self._fed += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Nothing here is upgraded to; the request is answered as if it had not asked.
            pass
        except httptools.HttpParserError:
            self._refuse(self._refusal or InvalidRequest("this is not a valid HTTP/1.1 request", code="bad_http"))
            return
        if self._fed > self.bounds.head_bytes:
            # A header, or a trailer, that has not ended is known to nobody but the parser.
            self._refuse(self._too_long())
        elif self._heading:
            if self._patience is None:
                self._be_patient(True)
        elif not self._bodying and self._is_answered() and self.timeout_keep_alive_task is None:
            self._wait_for_a_head()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._heading = True
        self._head = 0

    def on_url(self, url: bytes) -> None:
        """A part of the URL."""
        self._head += len(url)
        if self._head > self.bounds.url_bytes:
            self._stop(UriTooLong(f"the URL is longer than {self.bounds.url_bytes} bytes"))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        if not self._heading:
            return
        self._head += len(name) + len(value) + _PER_HEADER
        if self._head > self.bounds.head_bytes or len(self.headers) >= self.bounds.headers:
            self._stop(self._too_long())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._heading, self._bodying = False, True
        self._be_patient(False)
        if self.parser.get_http_version() not in _VERSIONS:
            self._stop(InvalidRequest("HTTP/1.1 is spoken here", code="bad_http"))
        names = [name for name, _ in self.headers]
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            self._stop(UnsupportedTransfer("a request body comes chunked or as it is"))
        if names.count(b"content-encoding") > 1:
            self._stop(UnsupportedMedia("a request body has one content-encoding, and none that changes it"))
        hosts = names.count(b"host")
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            self._stop(InvalidRequest("a request has one Host header", code="bad_host"))
        if self.parser.should_upgrade() and any(name in _BODIED for name, _ in self.headers):
            # The parser takes what follows for another protocol.
            self._stop(InvalidRequest("there is nothing to upgrade to; ask without", code="bad_http"))
        super().on_headers_complete()
        self._fed = 0
        if len(self.pipeline) > _MOST_PIPELINED:
            self._stop(InvalidRequest("too many requests wait on this connection", code="too_many_requests"))
        # Uvicorn reads no further while one waits, and would not see that the client leaves.
        self.flow.resume_reading()

    def on_chunk_header(self) -> None:
        """The length of a chunk, and whatever was said beside it."""
        self._fed = 0

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._fed = 0
        if self.pipeline and len(self.cycle.body) + len(body) > _LARGE_PIPELINED:
            self._stop(RequestTooLarge("a request waits on this connection; ask for so much once it is answered"))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole; what comes next is another one."""
        super().on_message_complete()
        self._bodying, self._fed = False, 0
        self._be_patient(False)

    def on_response_complete(self) -> None:
        """An answer is out."""
        super().on_response_complete()
        if self._bodying and self._is_answered() and not self._over and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._be_patient(True)

    def send_400_response(self, msg: str) -> None:
        """As JSON."""
        self._refuse(InvalidRequest(msg, code="bad_http"))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        if cycle.scope["http_version"] == http10.VERSION:
            cycle.__class__ = http10.UntilClosed
        cycle.scope["extensions"] = {BREAK_OFF: {"now": self.break_off}, PASS_ON: {"now": _passing_on(cycle)}}
        super()._start_asgi_task(cycle, app)

    def _tell_that_it_is_over(self) -> None:
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.message_event.set()

    def _too_long(self) -> ApiError:
        most = f"{self.bounds.headers} headers or {self.bounds.head_bytes} bytes"
        return HeadersTooLarge(f"the request's {'head has' if self._heading else 'trailers have'} more than {most}")

    def _stop(self, error: ApiError) -> None:
        """Make the parser give up; it says so to whoever feeds it."""
        self._refusal = error
        raise ValueError(error.message)

    def _is_answered(self) -> bool:
        """Whether nobody waits for an answer to the newest request."""
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error and close. Where the answer to an earlier request is on its way, that one is the last;
        where the answer to this one is out, nothing more is said.

        Closing at once would reset the connection and lose the answer, so what still comes is thrown away for a moment.
        """
        self._over = True
        self._be_patient(False)
        self._unset_keepalive_if_required()
        cycle = self.cycle
        said = self._bodying and self._is_answered() and cycle is not None and cycle.scope is self.scope
        if not self._is_answered():
            cycle.keep_alive = False
            if cycle.response_started or not cycle.more_body:
                return
            if self.pipeline:
                # It is the last of those that wait, and says so when it is its turn.
                self.pipeline[0] = (cycle, _Refusal(error))  # type: ignore[assignment]
                return
            cycle.disconnected = True
            cycle.message_event.set()
        if not said:
            body = write(error.body())
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _wait_for_a_head(self) -> None:
        """A client that says nothing is waited for as long as one between two requests."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _be_patient(self, on: bool) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._patience = self.loop.call_later(self.bounds.head_seconds, self._too_slow) if on else None

    def _too_slow(self) -> None:
        self._patience = None
        if not self.transport.is_closing():
            self._refuse(RequestTimeout(f"the request's head took over {self.bounds.head_seconds:g} seconds"))


def _passing_on(cycle: RequestResponseCycle) -> PassOn:
    """`cycle.send` of a part of a body that is not the last one, where that does not have to wait."""

    # The cycle knows this, too, and would keep itself until garbage is collected.
    found = weakref.ref(cycle)

    def pass_on(data: bytes | None) -> bool:
        cycle = found()
        if cycle is None or not (cycle.response_started and cycle.chunked_encoding):
            return False
        if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        if data:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return pass_on


class _Refusal:
    """An application with one answer."""

    def __init__(self, error: ApiError) -> None:
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await refuse_body(receive, send, self._error)
