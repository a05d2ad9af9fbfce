"""What one response leaves behind: an intent before, evidence or a reason after. Settled exactly once."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from policies.errors import StoreUnavailable
from policies.settings import BackendSettings
from policies.unit import declaration_of
from proxy.generation import ENDPOINT, STORE_UNAVAILABLE, Generation
from proxy.relay.clock import Clock
from proxy.relay.secret import NONE, secret_of
from proxy.services import Services
from proxy.tap.passed import Passed
from proxy.tap.types import Prepared, Tap

logger = logging.getLogger(__name__)


class Record:
    """The record of one response, from its intent to its evidence.

    `tap` is set once a backend answers; `received` counts the bytes it was fed, which bounds what it holds.
    `secret` is the key of the backend that is asked. `refusal` is why there is nothing to check, where the backend
    refused the request; that holds too where the client leaves before it has all of it. `asked` is the request's body
    as it came.

    What settles it may leave `more` to come: then it is not told of before `finish`, for an error of ours, in place of
    the answer or at its end, is part of what was served.
    """

    def __init__(self, services: Services, generation: Generation, clock: Clock, asked: bytes = b"") -> None:
        self.generation = generation
        self.opened = False
        self._intent: asyncio.Task[None] | None = None
        self.received = 0
        self.secret = NONE
        self.refusal: str | None = None
        self._services = services
        self._clock = clock
        self._asked = asked
        self._backend: BackendSettings | None = None
        self._prepared: Prepared | Passed | None = None
        self._tap: Tap | None = None
        self._settled = self._away = False
        self._used: tuple[int | None, int | None] | None = None
        self._shown = hashlib.sha256()
        self._began = False
        self._due: Callable[[], None] | None = None
        self._sent: bytes | None = None

    def open(self, backend: BackendSettings, *, stream: bool) -> None:
        """The intent for this backend goes to Redis with the event loop's next round, whoever leaves meanwhile."""
        self._backend = backend
        self.secret = secret_of(backend.api_key)
        self.generation.backend, self.generation.declaration = backend.name, declaration_of(backend)
        self.generation.stream = stream
        self.opened = True
        self._intent = asyncio.create_task(self._write())

    async def acknowledged(self) -> None:
        """Until Redis has the intent. Without Redis the response is served all the same, unverified. Raises whatever
        else kept it from being written."""
        if self._intent is not None:
            await asyncio.shield(self._intent)

    def when_known(self, then: Callable[[], None]) -> None:
        """Call it once it is known what became of the intent, which must be in Redis before anything else of it."""
        if self._intent is None or self._intent.done():
            then()
        else:
            self._intent.add_done_callback(lambda _: then())

    async def _write(self) -> None:
        try:
            await self._services.store.open(self.generation)
        except StoreUnavailable:
            self.generation.recorded = False

    def sending(self, body: bytes) -> None:
        """This body goes to the backend."""
        self._sent = body

    def listen(self, tap: Tap, prepared: Prepared | Passed) -> None:
        """From here on this tap knows what was delivered, of the answer to this request."""
        self._tap, self._prepared = tap, prepared

    def show(self, data: bytes) -> None:
        """These bytes go to the client: of the answer, or of an error of ours."""
        self._began = True
        self._shown.update(data)

    def used(self, *, delivered: bool) -> tuple[int | None, int | None] | None:
        """See Tap; None where nothing of an answer went to the client, who gets a body that is not streamed only once
        it is `delivered`."""
        tap = self._tap
        if tap is None or not tap.begun or not (delivered or tap.streamed or tap.content_type is not None):
            return None
        if not self._away:
            self._used = tap.used()
        return self._used

    @contextmanager
    def away(self) -> Iterator[None]:
        """While this lasts the tap is a thread's: of what it knows, what was asked last is told."""
        self._away = True
        try:
            yield
        finally:
            self._away = False

    def leave(self, fault: str, *, more: bool = False) -> None:
        """Nobody waits for the rest: what the client got is recorded as incomplete."""
        if self._settled:
            return
        if self.refusal is not None:
            self.unchecked(self.refusal, more=more)
        elif self._tap is None:
            self.unchecked(fault, more=more)
        else:
            try:
                self._tap.close(fault)
            except Exception:
                logger.exception("an answer could not be closed", extra={"id": self.generation.id})
            self.evidence(more=more)

    def evidence(self, *, more: bool = False) -> None:
        """The response is over and its tap closed: hand the evidence to the recorder."""
        tap = self._tap
        if self._settled or tap is None:
            return
        if self.refusal is not None or not self.generation.verifiable:
            self.unchecked(self.refusal or ENDPOINT, more=more)
            return
        self._settle(partial(self._hand_over, tap), more)

    def unchecked(self, reason: str, *, more: bool = False) -> None:
        """There is nothing to check, and why."""
        if not self._settled and self.opened:
            self._settle(partial(self._leave_unchecked, reason), more)

    def finish(self) -> None:
        """Nothing more goes to the client: the recorder is told what it was not told yet."""
        due, self._due = self._due, None
        if due is not None:
            self.generation.served = self._shown.hexdigest() if self._began else ""
            self.when_known(due)

    def _settle(self, due: Callable[[], None], more: bool) -> None:
        self._settled, self._due = True, due
        if not more:
            self.finish()

    def _hand_over(self, tap: Tap) -> None:
        meta, size = self._meta(), tap.held + self._bodies
        self._services.recorder.finished(self.generation, lambda: tap.evidence(**meta), size, self._sent or b"")

    def _leave_unchecked(self, reason: str) -> None:
        if self._sent is not None and not self.generation.sent:
            self.generation.sent = hashlib.sha256(self._sent).hexdigest()
        self._services.recorder.unchecked(self.generation, reason if self.generation.recorded else STORE_UNAVAILABLE)

    @property
    def _bodies(self) -> int:
        """Bytes of the request, as it came and as it went up, which the evidence keeps both."""
        sent = b"" if self._prepared is None else self._prepared.body
        return len(self._asked) + (len(sent) if sent is not self._asked else 0)

    def _meta(self) -> dict[str, object]:
        assert self._backend is not None
        assert self._prepared is not None
        return {
            "id": self.generation.id,
            "backend": self._backend.name,
            "model": self.generation.model,
            "runtime": self._backend.runtime,
            "precision": self._backend.precision,
            "engine": self._backend.engine,
            "speculative": self._backend.speculative,
            "stream": self._prepared.upstream_stream,
            "created": self.generation.created,
            "request": self._prepared.body,
            "asked": self._asked,
            "shown_sha256": self.generation.served,
            "first_token_seconds": self._clock.first_token,
            "total_seconds": self._clock.total,
        }
