"""One answer on its way back: what every way of passing it on needs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any

from policies.errors import ApiError, StoreUnavailable, UpstreamFailed, UpstreamTimeout
from policies.verification import pending, unverified
from proxy.generation import CLIENT_ERROR, ENDPOINT, NO_ANSWER, STORE_UNAVAILABLE
from proxy.relay import headers as names
from proxy.relay.aside import aside, sized
from proxy.relay.clock import Clock
from proxy.relay.downlink import Downlink
from proxy.relay.encoding import Decoder, Identity
from proxy.relay.record import Record
from proxy.relay.slices import SLICE, Stint, slices
from proxy.relay.through import Through, usual
from proxy.relay.transport import UpstreamResponse
from proxy.room import Overloaded
from proxy.services import Services
from proxy.tap.base import PROXY_OVERLOADED, error_of
from proxy.tap.types import Tap
from verifier_pool.link.telemetry import names as span_names
from verifier_pool.link.telemetry.tracing import step

logger = logging.getLogger(__name__)

_WEIGHED = 1024 * 1024
"""Bytes read after which it is looked at again how much of them is held."""
_LOOKED_AT = 4
"""Slices of what comes with the end of an answer that are looked at."""
_NO_FAULT_OF_THE_REQUEST = (408, 429)
TOO_LARGE = "too_large"
"""Code and fault of an answer over a bound."""

Headers = list[tuple[bytes, bytes]]
Sink = Callable[[bytes], Awaitable[None]]


class Answer:
    """An answer to one client. `retried` is the id of the rejected answer that this one takes the place of.

    Attributes:
        over: called once the backend has nothing more to say, whatever the client still waits for or takes its time
            with. What it said is known by then, as follows; where `Reply.relay` raises, it is not called.
        refused: the status of an error that came instead of an answer.
        broken, timed_out: the answer broke off, or an error took its place; it was because the backend fell silent.
        given_up: it broke off by our own doing.
        finished: its backend's connection was given back.
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
        self.services = services
        self.generation = record.generation
        self.over: Callable[[], None] = nothing
        self.refused: int | None = None
        self.broken = self.timed_out = self.given_up = self.finished = False
        self.decoder: Decoder = Identity()
        self._retried = retried
        self._clock = clock
        self._headers = headers

    async def pump(
        self, response: UpstreamResponse, tap: Tap, sink: Sink, limit: int | None, *, through: bool = False
    ) -> ApiError | None:
        """Feed the tap until the answer is over; returns what broke it, if something did. `through` says that all the
        sink does with what is usual is to send it to the client."""
        clock, record, decoder, down = self._clock, self.record, self.decoder, self.down
        weighed, stint = _WEIGHED, Stint()
        try:
            async with clock.deadline() as deadline, self.services.holding.answer(self.generation.backend) as part:
                passing, take = None, None
                if through and usual(tap, decoder):
                    passing = Through(tap, record, down, clock, deadline, weighed)
                    take = passing.take
                while data := await clock.reading(response.read(take), deadline):
                    with stint:
                        pieces = _pieces(decoder, data, tap)
                        for piece in pieces:
                            record.received += len(piece)
                            if limit is not None and record.received > limit:
                                raise UpstreamFailed("the backend's answer is over a bound", code=TOO_LARGE)
                            if tap.large and _ends_a_line(piece):
                                with record.away():
                                    out = await aside(partial(tap.feed, piece))
                            else:
                                out = tap.feed(piece)
                            if record.received >= weighed:
                                weighed = record.received + _WEIGHED
                                part.weigh(tap.held)
                                if passing is not None:
                                    passing.most = weighed
                            if tap.begun:
                                clock.began()
                            if out:
                                await sink(out)
                            tap.settle()
                            if tap.done:
                                _look_on(pieces, tap)
                                return None
                            if tap.failed or (tap.refusal is not None and not down.status):
                                return None
                            if stint.over:
                                await stint.give()
                                if clock.left <= 0:
                                    raise UpstreamTimeout("the backend did not answer in time")
            decoder.flush()
        except Overloaded as error:
            logger.warning(
                "an answer was given up: too much is held",
                extra={"id": self.generation.id, "backend": self.generation.backend},
            )
            self.given_up = True
            return error
        except (UpstreamFailed, UpstreamTimeout) as error:
            self.timed_out = isinstance(error, UpstreamTimeout)
            if self.timed_out:
                await clock.blame()
            return error
        return None

    async def last_byte(self, response: UpstreamResponse, tap: Tap) -> None:
        """Read the LF of a terminal frame that may end in CRLF."""
        _look_on(_pieces(self.decoder, await response.read(), tap), tap)

    async def gather(
        self, response: UpstreamResponse, tap: Tap, limit: int | None = None
    ) -> tuple[bytes, ApiError | None]:
        """The whole body as its client sees it, and what broke it, if something did."""
        parts: list[bytes] = []

        async def keep(data: bytes) -> None:
            parts.append(data)

        error = await self.pump(response, tap, keep, limit)
        parts.append(await self.close(tap, error))
        body = self.record.secret.mask(b"".join(parts), error=self.refused is not None)
        if tap.failed and error is None:
            error = error_of(tap.fault or TOO_LARGE)
        return body, error

    async def close(self, tap: Tap, error: ApiError | None) -> bytes:
        """Close a tap, and return what is left for the client."""
        if not tap.large:
            return tap.close(fault_of(error))
        with self.record.away():
            return await aside(partial(tap.close, fault_of(error)))

    async def show(self, data: bytes) -> None:
        """See Record.show."""
        await sized(len(data), partial(self.record.show, data))

    async def verdict(self) -> dict[str, Any]:
        """The verification, or what can be said of it within the inline wait."""
        intent = self.generation.intent()
        if not self.generation.recorded:
            return unverified(self.generation.id, STORE_UNAVAILABLE, intent, time.time())
        wait = self.services.store.wait(self.generation.id, self.services.settings.verification.inline_wait)
        before = self._clock.waited
        try:
            with step(span_names.INLINE) as span:
                found = await self._clock.waiting(wait) or pending(intent)
                if span is not None:
                    span.set({span_names.WORD: str(found["verdict"] or found["status"])})
                return found
        except StoreUnavailable:
            return unverified(self.generation.id, STORE_UNAVAILABLE, intent, time.time())
        except asyncio.CancelledError:
            if not self.services.drain.over:
                raise
            # The answer is here, whole: it does not stay because the time to wait for its verdict is over.
            return pending(intent)
        finally:
            self.services.metrics.inline_wait.record(self._clock.waited - before)

    def blame(self, status: int) -> None:
        """A refusal is settled by its status alone, so that no client can make it the backend's by leaving early."""
        if 400 <= status < 500:
            self.record.refusal = NO_ANSWER if status in _NO_FAULT_OF_THE_REQUEST else CLIENT_ERROR

    def their_headers(self, response: UpstreamResponse) -> list[tuple[bytes, bytes]]:
        """Those of the backend that the client may see."""
        return names.client_headers(response.headers, self.record.secret)

    def our_headers(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The given ones and ours: id, request id, and a mark when the answer cannot be verified or was retried."""
        ours = [(names.ID, self.generation.id.encode())]
        if self._retried is not None:
            ours.append((names.RETRIED, self._retried.encode()))
        why = None if self.generation.recorded else STORE_UNAVAILABLE
        if not self.generation.verifiable:
            why = ENDPOINT
        if why is not None:
            ours += [(names.VERDICT, b"unverified"), (names.REASON, why.encode())]
        return names.with_request_ids(headers, self._headers, self.generation.id) + ours


def nothing() -> None:
    """For whom it does not concern."""


def _pieces(decoder: Decoder, data: bytes, tap: Tap) -> Iterator[bytes]:
    """What was read, plain, in slices where the tap works on it at once."""
    for piece in decoder.decode(data):
        if tap.streamed and len(piece) > SLICE:
            yield from slices(piece)
        else:
            yield piece


def _look_on(pieces: Iterator[bytes], tap: Tap) -> None:
    """The tap is told of what came with the end of an answer, of which nothing goes on."""
    with contextlib.suppress(UpstreamFailed):
        for piece in itertools.islice(pieces, _LOOKED_AT):
            tap.feed(piece)


def _ends_a_line(piece: bytes) -> bool:
    return b"\n" in piece or b"\r" in piece


def fault_of(error: ApiError | None) -> str | None:
    """What a tap is told of what broke its answer."""
    if error is None:
        return None
    if isinstance(error, Overloaded):
        return PROXY_OVERLOADED
    if isinstance(error, UpstreamTimeout):
        return "upstream_timeout"
    return TOO_LARGE if error.error_code == TOO_LARGE else "upstream_closed"
