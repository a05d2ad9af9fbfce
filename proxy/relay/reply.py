"""The answer on its way back: which way it takes, and what is said where there is none."""

from __future__ import annotations

from contextlib import AbstractContextManager

from policies.errors import ApiError, UpstreamFailed, VerificationFailed
from proxy.relay import headers as names
from proxy.relay import streamed, whole
from proxy.relay.answer import Answer
from proxy.relay.asgi import answer_error
from proxy.relay.encoding import decoder_for
from proxy.relay.refusal import Declined, retryable
from proxy.relay.transport import UpstreamResponse
from proxy.tap import open_foreign_tap, open_tap
from proxy.tap.passed import Passed, error_event
from proxy.tap.rawjson import write
from proxy.tap.types import Prepared, Tap
from proxy.tap.words import said

# Clients ask again after a 502: for another generation, another verification, and as many tokens once more.
_REJECTED = ((names.VERDICT, b"reject"), names.NOT_AGAIN)
_EVENTS, _JSON = "text/event-stream", "application/json"


class Reply(Answer):
    """Writes one answer to the client."""

    _expected: tuple[str, Prepared, Tap] | None = None

    def kept_alive(self, stream: bool) -> AbstractContextManager[None]:
        """While this lasts, a client that waits for a stream hears from us now and then, where the settings say so."""
        return self.down.kept_alive(stream, lambda headers: self.our_headers(list(headers)))

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
        self.blame(response.status)
        self.decoder = decoder_for(names.first(response.headers, b"content-encoding"))
        content_type = names.first(response.headers, b"content-type").decode("latin-1")
        tap = self._open_tap(response, prepared, content_type or None)
        kind = (tap.content_type or content_type).lower()
        if kind and not kind.startswith("text/event-stream"):
            self.down.hush()
        if response.status >= 300:
            self.refused = response.status
            await whole.error(self, response, tap)
        elif tap.content_type is not None:
            await streamed.restream(self, response, tap, tap.content_type, last=last)
        elif tap.streamed:
            await streamed.stream(self, response, tap, last=last)
        else:
            await whole.whole(self, response, tap)

    def expect(self, prepared: Prepared | Passed) -> None:
        """Make ready for the answer that this request most likely gets."""
        if isinstance(prepared, Prepared) and self._expected is None:
            kind = _EVENTS if prepared.upstream_stream else _JSON
            self._expected = kind, prepared, self._tap_of(prepared, 200, kind)

    async def fail(self, error: ApiError) -> None:
        """Answer with an error of our own; in a stream that has begun, as its last event."""
        if self.down.delivered:
            return
        if self.down.status:
            event = error_event(self.generation.endpoint, error.body())
            self._last(event)
            await self.down.write(event, last=True)
            return
        self._last(write(said(self.generation.endpoint, error)))
        self.down.status = error.status
        self.down.close()
        marks = _REJECTED if isinstance(error, VerificationFailed) else ()
        echoed = names.echoed(self._headers)
        headers = self.our_headers(list(marks)) if self.record.opened else echoed
        await self._clock.writing(answer_error(self.down.send, error, headers, path=self.generation.endpoint))

    def _last(self, data: bytes) -> None:
        """These are the last bytes that the client gets."""
        self.record.show(data)
        self.record.finish()

    def _open_tap(self, response: UpstreamResponse, prepared: Prepared | Passed, content_type: str | None) -> Tap:
        tap: Tap
        if isinstance(prepared, Passed):
            tap = open_foreign_tap(prepared, content_type=content_type, bounds=self.services.settings.bounds)
        else:
            expected, self._expected = self._expected, None
            kind = (content_type or "").partition(";")[0].strip().lower()
            if expected is not None and expected[:2] == (kind, prepared) and response.status == 200:
                tap = expected[2]
            else:
                tap = self._tap_of(prepared, response.status, content_type)
        self.record.listen(tap, prepared)
        return tap

    def _tap_of(self, prepared: Prepared, status: int, content_type: str | None) -> Tap:
        return open_tap(
            prepared,
            self.generation.model,
            tokenizer=self.services.tokenizers.get(self.generation.model),
            status=status,
            content_type=content_type,
            bounds=self.services.settings.bounds,
        )
