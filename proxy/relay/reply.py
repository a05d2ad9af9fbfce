"""The answer on its way back: streamed as it comes, or whole, with the verdict where the client asked for it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import orjson

from policies.errors import ApiError, StoreUnavailable, UpstreamFailed, UpstreamTimeout, VerificationFailed
from policies.verification import pending, public, unverified
from proxy.generation import CLIENT_ERROR, ENDPOINT, NO_ANSWER, STORE_UNAVAILABLE
from proxy.relay import headers as names
from proxy.relay import inline
from proxy.relay.asgi import answer_error
from proxy.relay.clock import Clock
from proxy.relay.downlink import Downlink
from proxy.relay.encoding import Decoder, Identity, decoder_for
from proxy.relay.record import Record
from proxy.relay.refusal import Declined, retryable, status_of
from proxy.relay.transport import UpstreamResponse, finish
from proxy.services import Services
from proxy.tap import open_tap
from proxy.tap.foreign import Passed, error_event, open_foreign_tap
from proxy.tap.types import Prepared, Tap

_MAX_ANSWER = 256 * 1024 * 1024
_MAX_ERROR = 1024 * 1024
_FINISH_SECONDS = 0.5
_NO_FAULT_OF_THE_REQUEST = (408, 429)

Sink = Callable[[bytes], Awaitable[None]]


class Reply:
    """Writes one answer to the client. `retried` is the id of the rejected answer that this one takes the place of.

    Attributes:
        refused: the status of an error that came instead of an answer.
        broken, timed_out: the answer broke off, or an error took its place; it was because the backend fell silent.
    """

    def __init__(
        self,
        services: Services,
        record: Record,
        clock: Clock,
        headers: Mapping[bytes, bytes],
        down: Downlink,
        *,
        retried: str | None = None,
    ) -> None:
        self.record = record
        self.down = down
        self._services = services
        self._retried = retried
        self._generation = record.generation
        self._clock = clock
        self._headers = headers
        self._decoder: Decoder = Identity()
        self.refused: int | None = None
        self.broken = self.timed_out = False

    def kept_alive(self, stream: bool) -> AbstractContextManager[None]:
        """While this lasts, a client that waits for a stream hears from us now and then, where the settings say so."""
        return self.down.kept_alive(stream, lambda headers: self._our_headers(list(headers)))

    async def relay(self, response: UpstreamResponse, prepared: Prepared | Passed, *, last: bool) -> None:
        """Pass a backend's answer on.

        Args:
            last: nobody else can be asked. Otherwise Declined is raised where another backend may do better.

        Raises:
            ApiError: there is no answer to pass on, and nothing was sent; VerificationFailed among them.
        """
        if not (200 <= response.status < 300 or 400 <= response.status < 600):
            raise UpstreamFailed(f"the backend answered with status {response.status}")
        if not last and retryable(response.status):
            raise Declined(f"the backend answered with status {response.status}", response.status)
        self._blame(response.status)
        self._decoder = decoder_for(names.first(response.headers, b"content-encoding"))
        tap = self._open_tap(response, prepared)
        kind = (tap.content_type or names.first(response.headers, b"content-type").decode("latin-1")).lower()
        if kind and not kind.startswith("text/event-stream"):
            self.down.hush()
        if response.status >= 300:
            self.refused = response.status
            await self._error(response, tap)
        elif tap.content_type is not None:
            await self._restream(response, tap, tap.content_type, last=last)
        elif tap.streamed:
            await self._stream(response, tap, last=last)
        else:
            await self._whole(response, tap)

    async def fail(self, error: ApiError) -> None:
        """Answer with an error of our own; in a stream that has begun, as its last event."""
        if self.down.delivered:
            return
        if self.down.status:
            await self.down.write(error_event(self._generation.endpoint, error.body()), last=True)
            return
        self.down.status = error.status
        self.down.delivered = True
        marks = [(names.VERDICT, b"reject")] if isinstance(error, VerificationFailed) else []
        echoed = names.echoed(self._headers)
        await answer_error(self.down.send, error, self._our_headers(marks) if self.record.opened else echoed)

    async def _stream(self, response: UpstreamResponse, tap: Tap, *, last: bool) -> None:
        headers = names.client_headers(response.headers)

        async def sink(data: bytes) -> None:
            if self.down.status or not _unsent(tap):
                await self.down.start(response.status, self._our_headers(headers))
                self.record.show(data)
                await self.down.write(data)

        error = await self._pump(response, tap, sink, None)
        if tap.done.endswith(b"\n\r") and error is None:
            await self._last_byte(response, tap)
        rest = tap.close(_fault(error))
        if not self.down.status and _unsent(tap):
            await self._refuse(response, tap, error, last=last)
            return
        await self.down.start(response.status, self._our_headers(headers))
        await self._end_stream(tap, rest, broken=error is not None)
        if tap.done and error is None:
            await finish(response, _FINISH_SECONDS)

    async def _last_byte(self, response: UpstreamResponse, tap: Tap) -> None:
        """The terminal frame's lines end in CRLF, and the last LF has not been read."""
        with contextlib.suppress(TimeoutError, UpstreamFailed):
            async with asyncio.timeout(_FINISH_SECONDS):
                for piece in self._decoder.decode(await response.read()):
                    tap.feed(piece)

    async def _restream(self, response: UpstreamResponse, tap: Tap, content_type: str, *, last: bool) -> None:
        body, error = await self._gather(response, tap, _MAX_ANSWER)
        if error is not None:
            self.record.evidence()
            raise error
        if not self.down.status and (tap.refusal is not None or tap.fault is not None):
            await self._refuse(response, tap, None, last=last)
            return
        headers = [item for item in names.client_headers(response.headers) if item[0] != b"content-type"]
        await self.down.start(response.status, self._our_headers([*headers, (b"content-type", content_type.encode())]))
        await self._end_stream(tap, body, broken=False)

    async def _refuse(self, response: UpstreamResponse, tap: Tap, error: ApiError | None, *, last: bool) -> None:
        """A stream that was over before it said anything: nothing was sent, so the error can have its own status."""
        if tap.refusal is None:
            self.record.evidence()
            raise error or UpstreamFailed("the backend's answer ended before it began")
        status = status_of(tap.refusal)
        if not last and retryable(status):
            raise Declined(f"the backend's stream began with an error {status}", status)
        self.refused = status
        self._blame(status)
        self.record.show(tap.refusal)
        self.record.evidence()
        headers = [item for item in names.client_headers(response.headers) if item[0] != b"content-type"]
        await self._finish(status, [*headers, (b"content-type", b"application/json")], tap.refusal)

    async def _end_stream(self, tap: Tap, rest: bytes, *, broken: bool) -> None:
        """What is left of a stream; the inline verdict goes before the terminal frame."""
        self.broken = broken or tap.failed or tap.cut or tap.erred or tap.fault is not None
        self.record.show(rest + tap.done)
        self.record.evidence()
        if tap.cut:
            # An end without the last chunk is an error to every client.
            await self.down.write(rest)
            return
        if self._generation.mode == "inline" and self._generation.verifiable and not broken and not tap.failed:
            if rest:
                await self.down.write(rest)
            rest = inline.comment(public(await self._verdict()))
        await self.down.write(rest + tap.done, last=True)

    async def _whole(self, response: UpstreamResponse, tap: Tap) -> None:
        body, error = await self._gather(response, tap, _MAX_ANSWER)
        if error is None:
            self.record.show(body)
        self.record.evidence()
        if error is not None:
            raise error
        headers = names.client_headers(response.headers)
        if self._generation.mode == "inline" and self._generation.verifiable:
            verification = await self._verdict()
            word = verification["verdict"]
            if word == "reject" and self._services.settings.verification.on_reject != "annotate":
                raise VerificationFailed(f"the answer was rejected by its verification {self._generation.id}")
            headers.append((names.VERDICT, str(word or verification["status"]).encode()))
            body = inline.add_verdict(body, public(verification)) or body
        await self._finish(response.status, headers, body)

    async def _error(self, response: UpstreamResponse, tap: Tap) -> None:
        body, error = await self._gather(response, tap, _MAX_ERROR)
        if error is None:
            self.record.show(body)
        self.record.evidence()
        if error is not None:
            raise error
        await self._finish(response.status, names.client_headers(response.headers), body)

    async def _finish(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        if self.down.pinged:
            await self.down.write(_as_event(self._generation.endpoint, status, body), last=True)
            return
        length = (b"content-length", str(len(body)).encode())
        await self.down.start(status, self._our_headers([*headers, length]))
        await self.down.write(body, last=True)

    async def _gather(self, response: UpstreamResponse, tap: Tap, limit: int) -> tuple[bytes, ApiError | None]:
        parts: list[bytes] = []

        async def keep(data: bytes) -> None:
            parts.append(data)

        error = await self._pump(response, tap, keep, limit)
        parts.append(tap.close(_fault(error)))
        if tap.failed and error is None:
            error = UpstreamFailed("the backend's answer is too long", code="too_large")
        return b"".join(parts), error

    async def _pump(self, response: UpstreamResponse, tap: Tap, sink: Sink, limit: int | None) -> ApiError | None:
        """Feed the tap until the answer is over; returns what broke it, if something did."""
        clock, record, decoder, down = self._clock, self.record, self._decoder, self.down
        try:
            async with clock.patience() as deadline:
                while data := await clock.reading(response.read(), deadline):
                    for piece in decoder.decode(data):
                        record.received += len(piece)
                        if limit is not None and record.received > limit:
                            raise UpstreamFailed("the backend's answer is too long")
                        out = tap.feed(piece)
                        if tap.begun:
                            clock.began()
                        if out:
                            await sink(out)
                        if tap.done or tap.failed or (tap.refusal is not None and not down.status):
                            return None
            decoder.flush()
        except (UpstreamFailed, UpstreamTimeout) as error:
            self.timed_out = isinstance(error, UpstreamTimeout)
            return error
        return None

    async def _verdict(self) -> dict[str, Any]:
        """The verification, or what can be said of it within the inline wait."""
        intent = self._generation.intent()
        if not self._generation.recorded:
            return unverified(self._generation.id, STORE_UNAVAILABLE, intent, time.time())
        wait = self._services.store.wait(self._generation.id, self._services.settings.verification.inline_wait)
        before = self._clock.waited
        try:
            return await self._clock.waiting(wait) or pending(intent)
        except StoreUnavailable:
            return unverified(self._generation.id, STORE_UNAVAILABLE, intent, time.time())
        finally:
            self._services.metrics.inline_wait.record(self._clock.waited - before)

    def _blame(self, status: int) -> None:
        """A refusal is settled by its status alone, so that no client can make it the backend's by leaving early."""
        if 400 <= status < 500:
            self.record.unchecked(NO_ANSWER if status in _NO_FAULT_OF_THE_REQUEST else CLIENT_ERROR)

    def _open_tap(self, response: UpstreamResponse, prepared: Prepared | Passed) -> Tap:
        content_type = names.first(response.headers, b"content-type").decode("latin-1") or None
        tap: Tap
        if isinstance(prepared, Passed):
            limit = self._services.settings.max_line_bytes
            tap = open_foreign_tap(
                prepared, content_type=content_type, max_line_bytes=limit, max_body_bytes=_MAX_ANSWER
            )
        else:
            tap = open_tap(
                prepared,
                self._generation.model,
                tokenizer=self._services.tokenizers.get(self._generation.model),
                status=response.status,
                content_type=content_type,
                max_line_bytes=self._services.settings.max_line_bytes,
                max_body_bytes=_MAX_ANSWER,
            )
        self.record.listen(tap)
        return tap

    def _our_headers(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The given ones and ours: id, request id, and a mark when the answer cannot be verified or was retried."""
        ours = [(names.ID, self._generation.id.encode())]
        if self._retried is not None:
            ours.append((names.RETRIED, self._retried.encode()))
        why = None if self._generation.recorded else STORE_UNAVAILABLE
        if not self._generation.verifiable:
            why = ENDPOINT
        if why is not None:
            ours += [(names.VERDICT, b"unverified"), (names.REASON, why.encode())]
        return names.with_request_ids(headers, self._headers, self._generation.id) + ours


def _unsent(tap: Tap) -> bool:
    """Whether all that a stream has to show so far is an error."""
    return tap.refusal is not None or (tap.fault is not None and not tap.begun)


def _fault(error: ApiError | None) -> str | None:
    if error is None:
        return None
    return "upstream_timeout" if isinstance(error, UpstreamTimeout) else "upstream_closed"


def _as_event(path: str, status: int, body: bytes) -> bytes:
    """An answer that came too late for a status, as the last event of its stream."""
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        said = None
    if not isinstance(said, dict) or not isinstance(said.get("error"), dict):
        said = UpstreamFailed(f"the backend answered with status {status}").body()
    return error_event(path, UpstreamFailed("").body() | {"error": _FIELDS | said["error"]})


_FIELDS = {"message": "", "type": UpstreamFailed.type, "param": None, "code": None}
