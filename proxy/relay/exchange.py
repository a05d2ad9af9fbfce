"""One request's way: to a backend, back to the client, and its evidence to the recorder."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from functools import partial

from starlette.types import Send

from policies.errors import ApiError, BackendUnavailable
from proxy.backends.pool import Backend
from proxy.generation import CLIENT_LEFT, INTERNAL_ERROR, NO_ANSWER, Generation
from proxy.relay import headers as names
from proxy.relay.clock import Clock
from proxy.relay.record import Record
from proxy.relay.reply import Reply
from proxy.relay.transport import UpstreamRequest, UpstreamResponse
from proxy.services import Services
from proxy.tap.prepare import prepare
from proxy.tap.types import Prepared

logger = logging.getLogger(__name__)

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_OPERATIONS = {"chat": "chat", "completions": "text_completion"}
_CLIENT_LEFT_STATUS = 499
_LARGE = 256 * 1024


class Exchange:
    """An admitted request. `run` serves it; whatever happens, it leaves a record."""

    def __init__(
        self,
        services: Services,
        generation: Generation,
        body: bytes,
        headers: Mapping[bytes, bytes],
        candidates: list[Backend],
        send: Send,
    ) -> None:
        self._services = services
        self._generation = generation
        self._body = body
        self._headers = headers
        self._candidates = candidates
        self._seed = secrets.randbelow(2**62)
        self._clock = Clock(services.settings.timeouts)
        self._record = Record(services, generation, self._clock)
        self.reply = Reply(services, self._record, self._clock, headers, send)

    async def run(self) -> None:
        """Serve the request. Cancelled when the client leaves; then nothing is awaited any more."""
        try:
            await self._relay()
        except ApiError as error:
            self._record.unchecked(NO_ANSWER)
            await self.reply.fail(error)
        except asyncio.CancelledError:
            self._record.leave(CLIENT_LEFT)
            raise
        except Exception:
            logger.exception("a request broke the proxy", extra={"id": self._generation.id})
            self._record.unchecked(INTERNAL_ERROR)
            await self.reply.fail(ApiError("the proxy failed to serve this request", code="internal_error"))
        finally:
            self._services.store.served(self._generation.id)
            self._account()

    async def _relay(self) -> None:
        """Ask one backend after the other until one can be reached; after that there is no second try."""
        failure = BackendUnavailable("every backend of this model is at its limit; try again soon")
        for backend in self._candidates:
            if backend.full:
                continue
            with backend.serving():
                prepared = await self._prepare(backend)
                await self._record.open(backend.settings, prepared)
                try:
                    response = await self._reach(backend, prepared)
                except BackendUnavailable as error:
                    backend.unreachable()
                    failure = error
                    continue
                backend.reached()
                try:
                    await self.reply.relay(response, prepared)
                finally:
                    response.close()
                return
        raise failure

    async def _prepare(self, backend: Backend) -> Prepared:
        model = self._services.settings.models[self._generation.model]
        work = partial(prepare, self._generation.endpoint, self._body, model, backend.settings, seed=self._seed)
        # Megabytes of JSON take a second to read, in which nobody else's stream may stand still.
        return await asyncio.to_thread(work) if len(self._body) > _LARGE else work()

    async def _reach(self, backend: Backend, prepared: Prepared) -> UpstreamResponse:
        request = UpstreamRequest(
            url=backend.base_url + PATHS[self._generation.endpoint],
            headers=names.upstream_headers(self._headers, backend.settings.api_key, prepared.upstream_stream),
            body=prepared.body,
        )
        self._clock.went_up()
        async with self._clock.patience(self._services.settings.timeouts.first_byte):
            return await self._clock.waiting(self._services.transport.send(request))

    def _account(self) -> None:
        generation, metrics, clock = self._generation, self._services.metrics, self._clock
        status = self.reply.status if self.reply.delivered else _CLIENT_LEFT_STATUS
        backend = generation.backend or "none"
        metrics.requests.add(1, {"model": generation.model, "backend": backend, "status": status})
        metrics.overhead.record(clock.overhead, {"endpoint": generation.endpoint})
        genai = {"gen_ai.operation.name": _OPERATIONS[generation.endpoint], "gen_ai.request.model": generation.model}
        metrics.duration.record(clock.elapsed, genai)
        if clock.first_token is not None:
            metrics.first_token.record(clock.first_token, genai)
        logger.info(
            "served",
            extra={
                "id": generation.id,
                "endpoint": generation.endpoint,
                "model": generation.model,
                "backend": backend,
                "status": status,
                "seconds": round(clock.elapsed, 4),
                "added": round(clock.overhead, 5),
                "recorded": generation.recorded,
            },
        )
