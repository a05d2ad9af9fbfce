"""One generation: to a backend, its answer back to the client, its evidence to the recorder."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Mapping
from functools import partial

from policies.errors import ApiError, BackendUnavailable, UpstreamFailed, UpstreamTimeout
from policies.settings import BackendSettings
from proxy.backends.backend import Backend
from proxy.backends.route import Route
from proxy.backends.turn import Turn
from proxy.generation import CLIENT_LEFT, INTERNAL_ERROR, NO_ANSWER, PROXY_STOPPED, Generation
from proxy.relay import headers as names
from proxy.relay.answer import nothing
from proxy.relay.body import LARGE, Body
from proxy.relay.clock import Clock, Deadline
from proxy.relay.refusal import Declined
from proxy.relay.reply import Reply
from proxy.relay.transport import UpstreamRequest, UpstreamResponse
from proxy.services import Services
from proxy.tap.fields import refuse
from proxy.tap.passed import Passed, pass_on
from proxy.tap.prepare import prepare
from proxy.tap.types import Prepared

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class AskAnother(Exception):
    """A backend did not answer, nothing was sent to the client, and there are others to ask."""


class Attempt:
    """A generation on its way. `run` asks for it; whatever happens, it leaves a record of its own. Where it raises, who
    knows what its client is told finishes that.

    Attributes:
        generation: with an id and a seed that no other attempt shares.
        asked: the backend that took the request; None as long as none did.
        reply: where its answer goes.
    """

    def __init__(
        self,
        services: Services,
        generation: Generation,
        body: Body,
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

    async def run(self, route: Route, *, last: bool) -> None:
        """Ask one backend after the other until one can be reached. What became of the request there is this attempt's
        record; another try is another attempt.

        Cancelled when the client leaves; then nothing is awaited any more.

        Args:
            last: nobody is asked after the one that was reached, whatever it says.

        Raises:
            AskAnother: nothing was sent, and another one may answer.
            BackendUnavailable: none could be reached.
            VerificationFailed: the answer was rejected, and the policy is not to deliver it.
            ApiError: whatever else kept an answer from the client; nothing was sent, or the stream has begun.
        """
        try:
            await self._relay(route, last=last)
        except (ApiError, AskAnother):
            self._record.unchecked(NO_ANSWER, more=True)
            raise
        except asyncio.CancelledError:
            self._record.leave(PROXY_STOPPED if self._services.drain.over else CLIENT_LEFT, more=True)
            raise
        except Exception:
            # What came of an answer is checked all the same: a backend that finds out how gains nothing.
            self._record.leave(INTERNAL_ERROR, more=True)
            raise
        finally:
            self._record.when_known(partial(self._services.store.served, self.generation.id))

    async def _relay(self, route: Route, *, last: bool) -> None:
        failure: BackendUnavailable | None = None
        while (turn := await self._take(route)) is not None:
            with turn:
                if failure is not None:
                    self._services.metrics.passed_over(self.generation, "unreachable")
                prepared = await self._prepare(turn.backend.settings)
                with self.reply.kept_alive(prepared.asked.stream):
                    try:
                        await self._ask(turn, prepared, last=last or not route.another)
                        return
                    except BackendUnavailable as error:
                        turn.failed("unreachable")
                        failure = error
                    except (UpstreamFailed, UpstreamTimeout) as error:
                        self._blame(turn, error)
                        if not last and route.another and not self.reply.down.status and self._clock.left > 0:
                            raise AskAnother("another backend may answer") from error
                        raise
        try:
            raise failure or BackendUnavailable("no backend of this model can take the request now; try again soon")
        finally:
            del failure

    async def _take(self, route: Route) -> Turn | None:
        """See Route.take. What it takes to wait for a place is not our time."""
        try:
            return await route.take(self._clock.left)
        finally:
            if route.waited:
                self._clock.waited += route.waited
                self._services.metrics.queue_wait.record(route.waited, {"model": self.generation.model})
                route.waited = 0.0

    async def _ask(self, turn: Turn, prepared: Prepared | Passed, *, last: bool) -> None:
        response = await self._reach(turn.backend, prepared)
        self.asked = turn.backend
        self._clock.when_began = turn.began
        try:
            turn.answered(response.status, response.headers)
            # A client that was told to wait has the id of this attempt.
            response.when_whole(turn.free)
            self.reply.over = partial(self._settle, turn)
            await self.reply.relay(response, prepared, last=last or self.reply.down.pinged)
        finally:
            self._clock.when_began = None
            self.reply.over = nothing
            response.close()

    def _settle(self, turn: Turn) -> None:
        """The backend has nothing more to say, and the client may take its time: what that says of the backend."""
        if self.reply.refused is not None:
            turn.answered(self.reply.refused)
        elif self.reply.given_up:
            pass  # It says nothing of the backend.
        elif self.reply.timed_out:
            self._too_slow(turn)
        elif self.reply.broken:
            turn.failed("broken")
        else:
            turn.finished()
        turn.close()

    def _blame(self, turn: Turn, error: UpstreamFailed | UpstreamTimeout) -> None:
        """There was no answer: what that says of the backend."""
        if isinstance(error, UpstreamTimeout):
            self._too_slow(turn)
        elif isinstance(error, Declined):
            turn.answered(error.said)
        else:
            turn.failed("disconnected" if self.asked is None else "broken")

    def _too_slow(self, turn: Turn) -> None:
        # The total time-out is no measure of this backend: others had their part of it, or the answer is just long.
        if self._clock.left > 0:
            turn.failed("timeout")

    async def _prepare(self, backend: BackendSettings) -> Prepared | Passed:
        """The request as it goes up, made ready while its intent is on the way to Redis; a large one, which takes long,
        before that and in a thread. A request that is refused leaves no intent.
        """
        stream = self._body.stream
        if len(self._body.data) > LARGE:
            prepared = await asyncio.to_thread(self._rewritten_large, backend)
            self._record.open(backend, stream=stream)
        else:
            if self.generation.verifiable:
                refuse(self._body.fields)
            self._record.open(backend, stream=stream)
            try:
                prepared = self._rewritten(backend)
            except BaseException:
                await self._record.acknowledged()
                raise
        if self._services.settings.relay.keepalive:
            # A client that hears of us before the backend is asked is told whether anything is recorded.
            await self._record.acknowledged()
        return prepared

    def _rewritten(self, backend: BackendSettings) -> Prepared | Passed:
        if not self.generation.verifiable:
            return pass_on(self._body, backend)
        model = self._services.settings.models[self.generation.model]
        return prepare(self._body, model, backend, seed=self._seed)

    def _rewritten_large(self, backend: BackendSettings) -> Prepared | Passed:
        prepared = self._rewritten(backend)
        # A receipt's hash of a small one is made where one is needed (`Record.unchecked`).
        self.generation.sent = hashlib.sha256(prepared.body).hexdigest()
        return prepared

    async def _reach(self, backend: Backend, prepared: Prepared | Passed) -> UpstreamResponse:
        generation = self.generation
        self._record.sending(prepared.body)
        request = UpstreamRequest(
            url=backend.base_url + PATHS.get(generation.endpoint, generation.endpoint) + generation.query,
            headers=names.upstream_headers(
                self._headers,
                backend.settings.api_key,
                prepared.upstream_stream,
                verifiable=generation.verifiable,
                traced=backend.settings.trace_context,
            ),
            body=prepared.body,
        )
        try:
            async with self._clock.deadline() as deadline:
                ready, went = partial(self._go, prepared, deadline), partial(self._went, deadline)
                response = await self._clock.waiting(self._services.transport.send(request, ready, went))
        except Exception:
            await self._record.acknowledged()
            raise
        try:
            # A client gets nothing of an answer that nobody would know of if this process died.
            await self._clock.holding(self._record.acknowledged())
        except BaseException:
            response.close()
            raise
        return response

    async def _go(self, prepared: Prepared | Passed, deadline: Deadline) -> None:
        """The request goes up next, after its intent. While its answer is awaited, there is time to make ready for
        that."""
        await asyncio.sleep(0)
        # Connecting has a time of its own.
        deadline.until(time.monotonic() + self._clock.left)
        # Only after that has gone, which takes the loop one more round.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self.reply.expect, prepared)

    def _went(self, deadline: Deadline) -> None:
        """It goes up now."""
        self._clock.went_up()
        deadline.until(time.monotonic() + min(self._services.settings.timeouts.first_byte, self._clock.left))
