"""One generation: to a backend, its answer back to the client, its evidence to the recorder."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from functools import partial

from policies.errors import ApiError, BackendUnavailable, UpstreamFailed, UpstreamTimeout
from policies.evidence import Endpoint
from proxy.backends.pool import Backend
from proxy.generation import CLIENT_LEFT, INTERNAL_ERROR, NO_ANSWER, Generation
from proxy.relay import headers as names
from proxy.relay.clock import Clock
from proxy.relay.reply import Reply
from proxy.relay.transport import UpstreamRequest, UpstreamResponse
from proxy.services import Services
from proxy.tap.foreign import Passed, pass_on
from proxy.tap.prepare import prepare
from proxy.tap.types import Prepared

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_LARGE = 256 * 1024


class AskAnother(Exception):
    """A backend did not answer, nothing was sent to the client, and there are others to ask: `candidates`."""

    def __init__(self, candidates: Sequence[Backend]) -> None:
        super().__init__("another backend may answer")
        self.candidates = candidates


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

    async def run(self, candidates: Sequence[Backend], *, hinted: bool, last: bool) -> None:
        """Ask one backend after the other until one can be reached. What became of the request there is this attempt's
        record; another try is another attempt.

        Cancelled when the client leaves; then nothing is awaited any more.

        Args:
            hinted: an admin chose the backend, whatever its standing.
            last: nobody is asked after the one that was reached, whatever it says.

        Raises:
            AskAnother: nothing was sent, and another one may answer.
            BackendUnavailable: none could be reached.
            VerificationFailed: the answer was rejected, and the policy is not to deliver it.
            ApiError: whatever else kept an answer from the client; nothing was sent, or the stream has begun.
        """
        try:
            await self._relay(candidates, hinted=hinted, last=last)
        except (ApiError, AskAnother):
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

    async def _relay(self, candidates: Sequence[Backend], *, hinted: bool, last: bool) -> None:
        failure = BackendUnavailable("no backend of this model can take the request now; try again soon")
        for at, backend in enumerate(candidates):
            # Its state may have changed since it was chosen: reaching the one before takes seconds.
            if not _may_serve(backend, hinted=hinted):
                continue
            others = [] if last else [other for other in candidates[at + 1 :] if _may_serve(other, hinted=hinted)]
            with backend.serving():
                prepared = await self._prepare(backend)
                await self._record.open(backend.settings, prepared)
                with self.reply.kept_alive(prepared.asked.stream):
                    try:
                        await self._ask(backend, prepared, last=not others)
                        return
                    except BackendUnavailable as error:
                        backend.unreachable()
                        failure = error
                    except (UpstreamFailed, UpstreamTimeout) as error:
                        if others and not self.reply.down.status and self._clock.left > 0:
                            raise AskAnother(others) from error
                        raise
        raise failure

    async def _ask(self, backend: Backend, prepared: Prepared | Passed, *, last: bool) -> None:
        response = await self._reach(backend, prepared)
        backend.reached()
        self.asked = backend
        try:
            # A client that was told to wait has the id of this attempt.
            await self.reply.relay(response, prepared, last=last or self.reply.down.pinged)
        finally:
            response.close()

    async def _prepare(self, backend: Backend) -> Prepared | Passed:
        if not self.generation.verifiable:
            return pass_on(self.generation.endpoint, self._body, backend.settings)
        model = self._services.settings.models[self.generation.model]
        endpoint: Endpoint = "chat" if self.generation.endpoint == "chat" else "completions"
        work = partial(prepare, endpoint, self._body, model, backend.settings, seed=self._seed)
        # Megabytes of JSON take a second to read, in which nobody else's stream may stand still.
        return await asyncio.to_thread(work) if len(self._body) > _LARGE else work()

    async def _reach(self, backend: Backend, prepared: Prepared | Passed) -> UpstreamResponse:
        generation = self.generation
        request = UpstreamRequest(
            url=backend.base_url + PATHS.get(generation.endpoint, generation.endpoint),
            headers=names.upstream_headers(
                self._headers, backend.settings.api_key, prepared.upstream_stream, verifiable=generation.verifiable
            ),
            body=prepared.body,
        )
        self._clock.went_up()
        async with self._clock.patience(min(self._services.settings.timeouts.first_byte, self._clock.left)):
            return await self._clock.waiting(self._services.transport.send(request))


def _may_serve(backend: Backend, *, hinted: bool) -> bool:
    return not backend.full and (hinted or not backend.quarantined)
