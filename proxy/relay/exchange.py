"""One request's way: a generation, and a second one where the policy is not to deliver a rejected answer."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping

from starlette.types import Send

from policies import withheld
from policies.errors import ApiError, BackendUnavailable, UpstreamFailed, UpstreamTimeout, VerificationFailed
from proxy.backends.backend import Backend
from proxy.backends.route import Route
from proxy.generation import Generation
from proxy.relay.attempt import AskAnother, Attempt
from proxy.relay.body import Body
from proxy.relay.clock import Clock
from proxy.relay.downlink import Downlink, PassOn
from proxy.relay.record import Record
from proxy.relay.refusal import reason_of
from proxy.relay.reply import Reply
from proxy.relay.traced import TracedAttempt
from proxy.responses import aside
from proxy.room import Overloaded
from proxy.services import Services
from verifier_pool.link.telemetry.tracing import here

logger = logging.getLogger(__name__)

_CLIENT_LEFT_STATUS = 499


def shutting_down() -> ApiError:
    """Said to whoever is not served any more."""
    return BackendUnavailable("this proxy is shutting down; try again", code="draining")


class Exchange:
    """An admitted request. `run` serves it.

    With the policy `retry` a rejected answer is thrown away and one other backend is asked, as a generation of its own:
    each has its id, its seed, its evidence and its verdict, and the total time-out holds for both together.
    """

    def __init__(
        self,
        services: Services,
        generation: Generation,
        body: Body,
        headers: Mapping[bytes, bytes],
        route: Route,
        send: Send,
        pass_on: PassOn | None = None,
    ) -> None:
        self._services = services
        self._body = body
        self._headers = headers
        self._route = route
        self._clock = Clock(services.settings.timeouts)
        self.down = Downlink(send, self._clock, services.settings.relay.keepalive, pass_on)
        self._retried: str | None = None
        self._rejected = self._counted = False
        self._attempt = self._begin(generation)

    async def run(self) -> None:
        """Serve the request. Cancelled when the client leaves; then nothing is awaited any more. One that does not take
        its answer within the total time-out has left, too: what it gets ends in the middle."""
        try:
            with self._clock.limit() as limit:
                await self._answer()
            if limit.cut:
                self.down.delivered = False
        finally:
            self._attempt.reply.record.finish()
            self._account()

    def used(self) -> tuple[int | None, int | None] | None:
        """Tokens of the prompt and of the answer, as far as they are known, of what the client got so far; None where
        it got nothing of an answer."""
        reply = self._attempt.reply
        if not 200 <= self.down.status < 300 or reply.refused is not None:
            return None
        return reply.record.used(delivered=self.down.delivered)

    async def _answer(self) -> None:
        try:
            await self._serve()
        except VerificationFailed as error:
            self._rejected = True
            await self._attempt.reply.fail(error)
        except ApiError as error:
            await self._attempt.reply.fail(error)
        except asyncio.CancelledError:
            # A stream that has begun ends in the middle; who has nothing yet can be told.
            if not self._services.drain.over or self.down.status:
                raise
            await self._attempt.reply.fail(shutting_down())
        except Exception:
            logger.exception("a request broke the proxy", extra={"id": self._attempt.generation.id})
            await self._attempt.reply.fail(ApiError("the proxy failed to serve this request", code="internal_error"))

    async def _serve(self) -> None:
        try:
            await self._ask(self._route)
        except VerificationFailed:
            if self._services.settings.verification.on_reject != "retry":
                raise
            await self._again()

    async def _ask(self, route: Route) -> None:
        """Ask for an answer, elsewhere too where a backend fails before anything was sent."""
        for tries in range(self._services.settings.relay.retries, -1, -1):
            try:
                return await self._attempt.run(route, last=not tries)
            except AskAnother as failed:
                generation = self._attempt.generation
                why = reason_of(failed.__cause__)
                self._services.metrics.passed_over(generation, why)
                logger.info("asking another", extra={"id": generation.id, "backend": generation.backend, "why": why})
                self._attempt.reply.record.finish()
                self._attempt = self._begin(generation.again(secrets.token_hex(16)))
        raise AssertionError("the last attempt asks nobody else")

    async def _again(self) -> None:
        """The answer was rejected: ask one other backend. Raises VerificationFailed, which names the verifications."""
        first = self._attempt
        id = first.generation.id
        alone = withheld.not_taken_over(id)
        others = self._others(first.asked)
        if others is None or self._clock.left <= 0:
            raise alone
        self._services.metrics.rejected(first.generation, self._clock, again=True)
        self._retried = id
        self._attempt = self._begin(first.generation.again(secrets.token_hex(16)))
        try:
            await self._ask(others)
        except BackendUnavailable as error:
            self._attempt.reply.record.finish()
            self._attempt, self._retried, self._counted = first, None, True
            raise alone from error
        except VerificationFailed as error:
            raise withheld.both_rejected(id, self._attempt.generation.id) from error

    def _others(self, asked: Backend | None) -> Route | None:
        """Whom else to ask; nobody where an admin wanted that very backend, or took the model away meanwhile."""
        model = self._attempt.generation.model
        if self._route.hint is not None or model not in self._services.backends.groups:
            return None
        route = self._services.backends.route(
            model,
            fields=self._body.fields,
            owner=self._attempt.generation.owner,
            without=asked,
        )
        return route if route.open else None

    def _begin(self, generation: Generation) -> Attempt:
        services, clock = self._services, self._clock
        record = Record(services, generation, clock, self._body.data)
        reply = Reply(services, record, clock, self._headers, self.down, retried=self._retried)
        kind = Attempt if services.tracing is None or here() is None else TracedAttempt
        return kind(services, generation, self._body, self._headers, clock, reply)

    def _cut_status(self) -> int:
        """What stands for an answer that its client did not get to the end of: by whose doing."""
        reply = self._attempt.reply
        if reply.broken:
            if reply.given_up:
                return Overloaded.status
            return UpstreamTimeout.status if reply.timed_out else UpstreamFailed.status
        return BackendUnavailable.status if self._services.drain.over else _CLIENT_LEFT_STATUS

    def _account(self) -> None:
        generation, clock = self._attempt.generation, self._clock
        status = self.down.status if self.down.delivered else self._cut_status()
        with aside():
            # Of what is recorded the recorder counts the tokens, off the event loop.
            used = None if generation.verifiable and generation.recorded else self.used()
            if not self._rejected:
                self._services.metrics.served(generation, clock, status, used)
            elif not self._counted:
                self._services.metrics.rejected(generation, clock, again=False)
        logger.info(
            "served",
            extra={
                "id": generation.id,
                "endpoint": generation.endpoint,
                "model": generation.model,
                "backend": generation.backend or "none",
                "status": status,
                "seconds": round(clock.elapsed, 4),
                "added": round(clock.overhead, 5),
                "recorded": generation.recorded,
            }
            | ({"retried": self._retried} if self._retried else {}),
        )
