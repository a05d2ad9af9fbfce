"""The answer on its way back: streamed as it comes, or whole, with the verdict where the client asked for it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.types import Send

from policies.errors import ApiError, StoreUnavailable, UpstreamFailed, UpstreamTimeout, VerificationFailed
from policies.verification import pending, public, unverified
from proxy.generation import CLIENT_ERROR, NO_ANSWER, STORE_UNAVAILABLE
from proxy.relay import headers as names
from proxy.relay import inline
from proxy.relay.asgi import answer_error
from proxy.relay.clock import Clock
from proxy.relay.encoding import Decoder, Identity, decoder_for
from proxy.relay.record import Record
from proxy.relay.transport import UpstreamResponse, finish
from proxy.services import Services
from proxy.tap import open_tap
from proxy.tap.types import Prepared, Tap

_MAX_ANSWER = 256 * 1024 * 1024
_MAX_ERROR = 1024 * 1024
_FINISH_SECONDS = 0.5
_NO_FAULT_OF_THE_REQUEST = (408, 429)

Sink = Callable[[bytes], Awaitable[None]]


class Reply:
    """Writes one answer to the client.

    `status` is what the client got, 0 before that; `delivered` is true once nothing more will be sent, after
    which a client that leaves is not one that left early. `retried` is the id of the rejected answer that this one
    takes the place of.
    """

    def __init__(
        self,
        services: Services,
        record: Record,
        clock: Clock,
        headers: Mapping[bytes, bytes],
        send: Send,
        *,
        retried: str | None = None,
    ) -> None:
        self.status = 0
        self.delivered = False
        self.record = record
        self._services = services
        self._retried = retried
        self._generation = record.generation
        self._clock = clock
        self._headers = headers
        self._send = send
        self._decoder: Decoder = Identity()

    async def relay(self, response: UpstreamResponse, prepared: Prepared) -> None:
        """Pass a backend's answer on. Raises ApiError as long as nothing was sent, VerificationFailed among them."""
        if not (200 <= response.status < 300 or 400 <= response.status < 600):
            raise UpstreamFailed(f"the backend answered with status {response.status}")
        if 400 <= response.status < 500:
            # Said by the status alone, so that no client can make it the backend's by leaving early.
            self.record.unchecked(NO_ANSWER if response.status in _NO_FAULT_OF_THE_REQUEST else CLIENT_ERROR)
        self._decoder = decoder_for(names.first(response.headers, b"content-encoding"))
        tap = self._open_tap(response, prepared)
        if response.status >= 300:
            await self._error(response, tap)
        elif tap.content_type is not None:
            await self._restream(response, tap, tap.content_type)
        elif tap.streamed:
            await self._stream(response, tap)
        else:
            await self._whole(response, tap)

    async def fail(self, error: ApiError) -> None:
        """Answer with an error of our own; in a stream that has begun, as its last frame."""
        if self.delivered:
            return
        if self.status:
            await self._write(b"data: " + inline.dumps(error.body()) + b"\n\n", last=True)
            return
        self.status = error.status
        self.delivered = True
        marks = [(names.VERDICT, b"reject")] if isinstance(error, VerificationFailed) else []
        await answer_error(self._send, error, self._our_headers(marks) if self.record.opened else [])

    async def _stream(self, response: UpstreamResponse, tap: Tap) -> None:
        await self._start(response.status, names.client_headers(response.headers))
        error = await self._pump(response, tap, self._write, None)
        await self._end_stream(tap, tap.close(_fault(error)), broken=error is not None)
        if tap.done and error is None:
            await finish(response, _FINISH_SECONDS)

    async def _restream(self, response: UpstreamResponse, tap: Tap, content_type: str) -> None:
        body, error = await self._gather(response, tap, _MAX_ANSWER)
        if error is not None:
            self.record.evidence()
            raise error
        headers = [item for item in names.client_headers(response.headers) if item[0] != b"content-type"]
        await self._start(response.status, [*headers, (b"content-type", content_type.encode())])
        await self._end_stream(tap, body, broken=False)

    async def _end_stream(self, tap: Tap, last: bytes, *, broken: bool) -> None:
        """What is left of a stream; the inline verdict goes before the terminal frame."""
        self.record.evidence()
        if self._generation.mode == "inline" and not broken and not tap.failed:
            if last:
                await self._write(last)
            last = inline.comment(public(await self._verdict()))
        await self._write(last + tap.done, last=True)

    async def _whole(self, response: UpstreamResponse, tap: Tap) -> None:
        body, error = await self._gather(response, tap, _MAX_ANSWER)
        self.record.evidence()
        if error is not None:
            raise error
        marks: list[tuple[bytes, bytes]] = []
        if self._generation.mode == "inline":
            verification = await self._verdict()
            word = verification["verdict"]
            if word == "reject" and self._services.settings.verification.on_reject != "annotate":
                raise VerificationFailed(f"the answer was rejected by its verification {self._generation.id}")
            marks.append((names.VERDICT, str(word or verification["status"]).encode()))
            body = inline.add_verdict(body, public(verification)) or body
        await self._finish(response, body, marks)

    async def _error(self, response: UpstreamResponse, tap: Tap) -> None:
        body, error = await self._gather(response, tap, _MAX_ERROR)
        self.record.evidence()
        if error is not None:
            raise error
        await self._finish(response, body, [])

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
        clock, record, decoder = self._clock, self.record, self._decoder
        try:
            async with clock.patience() as deadline:
                while data := await clock.reading(response.read(), deadline):
                    for piece in decoder.decode(data):
                        record.received += len(piece)
                        if limit is not None and record.received > limit:
                            raise UpstreamFailed("the backend's answer is too long")
                        if out := tap.feed(piece):
                            await sink(out)
                        if tap.done or tap.failed:
                            return None
            decoder.flush()
        except (UpstreamFailed, UpstreamTimeout) as error:
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

    def _open_tap(self, response: UpstreamResponse, prepared: Prepared) -> Tap:
        tap = open_tap(
            prepared,
            self._generation.model,
            tokenizer=self._services.tokenizers.get(self._generation.model),
            status=response.status,
            content_type=names.first(response.headers, b"content-type").decode("latin-1") or None,
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
        if not self._generation.recorded:
            ours += [(names.VERDICT, b"unverified"), (names.REASON, STORE_UNAVAILABLE.encode())]
        theirs = names.request_id(self._headers)
        if theirs is None and names.first(headers, names.REQUEST_ID):
            return headers + ours
        kept = [(name, value) for name, value in headers if name != names.REQUEST_ID]
        return [*kept, *ours, (names.REQUEST_ID, (theirs or self._generation.id).encode())]

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        message = {"type": "http.response.start", "status": status, "headers": self._our_headers(headers)}
        await self._clock.waiting(self._send(message))

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        self.delivered = last
        await self._clock.waiting(self._send({"type": "http.response.body", "body": data, "more_body": not last}))

    async def _finish(self, response: UpstreamResponse, body: bytes, marks: list[tuple[bytes, bytes]]) -> None:
        headers = names.client_headers(response.headers)
        await self._start(response.status, [*headers, *marks, (b"content-length", str(len(body)).encode())])
        await self._write(body, last=True)


def _fault(error: ApiError | None) -> str | None:
    if error is None:
        return None
    return "upstream_timeout" if isinstance(error, UpstreamTimeout) else "upstream_closed"
