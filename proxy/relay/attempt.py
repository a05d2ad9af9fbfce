"""One generation: to a backend, its answer back to the client, its evidence to the recorder."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from functools import partial

from policies.errors import ApiError, BackendUnavailable
from proxy.backends.pool import Backend
from proxy.generation import CLIENT_LEFT, INTERNAL_ERROR, NO_ANSWER, Generation
from proxy.relay import headers as names
from proxy.relay.clock import Clock
from proxy.relay.reply import Reply
from proxy.relay.transport import UpstreamRequest, UpstreamResponse
from proxy.services import Services
from proxy.tap.prepare import prepare
from proxy.tap.types import Prepared

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_LARGE = 256 * 1024


class Attempt:
    """A generation on its way. `run` asks for it; whatever happens, it leaves a record of its own.

    Attributes:
        generation: with an id and a seed that no other attempt shares.
        asked: the backend that took the request; None as long as none did.
        reply: where its answer goes.
    """

    def __init__(
        self,
        services: Services,
        generation: Generation,
        body: bytes,
        headers: Mapping[bytes, bytes],
        clock: Clock,
        reply: Reply,
    ) -> None:
        self.generation = generation
        self.asked: Backend | None = None
        self.reply = reply
        self._services = services
        self._body = body
        self._headers = headers
        self._seed = secrets.randbelow(2**62)
        self._clock = clock
        self._record = reply.record

    async def run(self, candidates: Sequence[Backend], *, hinted: bool) -> None:
        """Ask one backend after the other until one can be reached; after that there is no second try.

        Cancelled when the client leaves; then nothing is awaited any more.

        Args:
            hinted: an admin chose the backend, whatever its standing.

        Raises:
            BackendUnavailable: none could be reached.
            VerificationFailed: the answer was rejected, and the policy is not to deliver it.
            ApiError: whatever else kept an answer from the client; nothing was sent, or the stream has begun.
        """
        try:
            await self._relay(candidates, hinted=hinted)
        except ApiError:
            self._record.unchecked(NO_ANSWER)
            raise
        except asyncio.CancelledError:
            self._record.leave(CLIENT_LEFT)
            raise
        except Exception:
            self._record.unchecked(INTERNAL_ERROR)
            raise
        finally:
            self._services.store.served(self.generation.id)

    async def _relay(self, candidates: Sequence[Backend], *, hinted: bool) -> None:
        failure = BackendUnavailable("no backend of this model can take the request now; try again soon")
        for backend in candidates:
            # Its state may have changed since it was chosen: reaching the one before takes seconds.
            if backend.full or (backend.quarantined and not hinted):
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
                self.asked = backend
                try:
                    await self.reply.relay(response, prepared)
                finally:
                    response.close()
                return
        raise failure

    async def _prepare(self, backend: Backend) -> Prepared:
        model = self._services.settings.models[self.generation.model]
        work = partial(prepare, self.generation.endpoint, self._body, model, backend.settings, seed=self._seed)
        # Megabytes of JSON take a second to read, in which nobody else's stream may stand still.
        return await asyncio.to_thread(work) if len(self._body) > _LARGE else work()

    async def _reach(self, backend: Backend, prepared: Prepared) -> UpstreamResponse:
        request = UpstreamRequest(
            url=backend.base_url + PATHS[self.generation.endpoint],
            headers=names.upstream_headers(self._headers, backend.settings.api_key, prepared.upstream_stream),
            body=prepared.body,
        )
        self._clock.went_up()
        async with self._clock.patience(min(self._services.settings.timeouts.first_byte, self._clock.left)):
            return await self._clock.waiting(self._services.transport.send(request))
