"""An attempt with spans: one of its generation, on which everything hangs that becomes of it, in other processes too;
below that one of waiting for a place, and one of asking each backend."""

from __future__ import annotations

import asyncio
import time

from opentelemetry.trace import SpanKind
from yarl import URL

from policies.errors import ApiError
from proxy.backends.backend import Backend
from proxy.backends.route import Route
from proxy.backends.turn import Turn
from proxy.conventions import PROVIDER, operation_of
from proxy.relay.attempt import AskAnother, Attempt
from proxy.relay.transport import UpstreamResponse
from proxy.tap.passed import Passed
from proxy.tap.types import Prepared
from verifier_pool.link.telemetry import names
from verifier_pool.link.telemetry.tracing import Attributes, Spanned, here

_SECOND = 10**9


class TracedAttempt(Attempt):
    """See Attempt. Made where a request is traced, whose span is around."""

    _up: int = 0
    _status: int | None = None

    async def run(self, route: Route, *, last: bool) -> None:
        """See Attempt."""
        request, generation = here(), self.generation
        assert request is not None
        about = {names.ID: generation.id, names.MODE: generation.mode, names.MODEL: generation.model}
        request.rename(f"{self._operation} {generation.model}")
        request.set({**about, names.PROVIDER: PROVIDER, names.STREAM: self._body.stream})
        with request.tracing.span(names.GENERATION, request.context, about) as span:
            assert span is not None
            generation.trace = span.context
            try:
                await super().run(route, last=last)
            except BaseException as error:
                span.failed(_why(error))
                raise
            finally:
                if self.reply.broken or self.reply.timed_out:
                    span.failed("timeout" if self.reply.timed_out else "broken")
                for each in (request, span):
                    each.set({names.BACKEND: generation.backend or None})

    async def _take(self, route: Route) -> Turn | None:
        span, before, began = here(), self._clock.waited, time.time_ns()
        assert span is not None
        try:
            return await super()._take(route)
        finally:
            if self._clock.waited > before:
                span.tracing.past(names.PLACE, span.context, began, None, {names.MODEL: self.generation.model})

    async def _ask(self, turn: Turn, prepared: Prepared | Passed, *, last: bool) -> None:
        generation, host = here(), URL(turn.backend.base_url)
        assert generation is not None
        attributes: Attributes = {
            names.OPERATION: self._operation,
            names.PROVIDER: PROVIDER,
            names.MODEL: self.generation.model,
            names.STREAM: prepared.upstream_stream,
            names.HOST: host.host,
            names.PORT: host.port,
            names.BACKEND: turn.backend.name,
            names.ID: self.generation.id,
        }
        span = generation.tracing.start(
            names.UPSTREAM,
            generation.context,
            attributes,
            name=f"{self._operation} {self.generation.model}",
            role=SpanKind.CLIENT,
        )
        kept, self._headers = self._headers, {**self._headers, b"traceparent": span.context.encode()}
        self._headers.pop(b"tracestate", None)
        self._up, self._status = time.time_ns(), None
        try:
            await super()._ask(turn, prepared, last=last)
        except BaseException as error:
            span.failed(_why(error))
            raise
        finally:
            self._headers = kept
            self._end(span)

    async def _reach(self, backend: Backend, prepared: Prepared | Passed) -> UpstreamResponse:
        self._up = time.time_ns()
        response = await super()._reach(backend, prepared)
        self._status = response.status
        return response

    def _end(self, span: Spanned) -> None:
        """Say how it went. The backend was done with its last byte, whatever the client then waited for."""
        clock, reply = self._clock, self.reply
        first, total = (clock.first_token, clock.total) if self._status is not None else (None, None)
        if first is not None:
            span.event(names.FIRST_TOKEN, self._up + int(first * _SECOND))
        if reply.timed_out or reply.broken:
            span.failed("timeout" if reply.timed_out else "broken")
        elif self._status is not None and self._status >= 400:
            span.failed(str(self._status))
        prompt, answer = reply.record.used(delivered=True) or (None, None)
        span.set(
            {
                names.STATUS: self._status,
                names.FIRST_CHUNK: first,
                names.INPUT_TOKENS: prompt,
                names.OUTPUT_TOKENS: answer,
            }
        )
        span.end(None if total is None else self._up + int(total * _SECOND))

    @property
    def _operation(self) -> str:
        return operation_of(self.generation.endpoint)


def _why(error: BaseException) -> str:
    """What went wrong, by a name of ours."""
    if isinstance(error, asyncio.CancelledError):
        return "client_left"
    if isinstance(error, AskAnother) and error.__cause__ is not None:
        return _why(error.__cause__)
    if isinstance(error, ApiError):
        return error.error_code or error.type
    return type(error).__name__
