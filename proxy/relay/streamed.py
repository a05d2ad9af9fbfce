"""An answer as a stream: passed on as it comes, the verdict before its terminal frame."""

from __future__ import annotations

import asyncio
import contextlib

from policies.errors import ApiError, UpstreamFailed
from policies.verification import public
from proxy.relay import inline
from proxy.relay.answer import Answer
from proxy.relay.encoding import Identity
from proxy.relay.refusal import Declined, retryable, status_of
from proxy.relay.transport import UpstreamResponse, finish
from proxy.relay.whole import deliver, shaped
from proxy.tap.base import LARGE
from proxy.tap.types import Tap

_FINISH_SECONDS = 0.5
_HALF_ENDED = (b"\n\r", b"\r\r")
"""An empty line ends so where the LF of its CRLF has not been read."""


async def stream(answer: Answer, response: UpstreamResponse, tap: Tap, *, last: bool) -> None:
    """Pass on what comes as it comes. Raises what `Reply.relay` does."""
    headers = answer.their_headers(response)
    down, record = answer.down, answer.record

    async def sink(data: bytes) -> None:
        if not down.status:
            if _unsent(tap):
                return
            await down.start(response.status, answer.our_headers(headers))
        data = record.secret.mask(data, error=tap.erred)
        if len(data) <= LARGE:
            record.show(data)
        else:
            await answer.show(data)
        await down.write(data)

    error = await answer.pump(response, tap, sink, None, through=True)
    if tap.done.endswith(_HALF_ENDED) and error is None:
        await _last_byte(answer, response, tap)
    rest = record.secret.mask(await answer.close(tap, error), error=tap.erred)
    if not down.status and _unsent(tap):
        await _refuse(answer, response, tap, error, last=last)
        return
    _over(answer, tap, error)
    if error is not None or tap.failed:
        # Nothing more is read of it, and its client may take its time.
        response.close()
    await down.start(response.status, answer.our_headers(headers))
    await _end(answer, response, tap, rest, whole=error is None)
    if tap.done and error is None:
        await _finish(answer, response)


async def restream(answer: Answer, response: UpstreamResponse, tap: Tap, content_type: str, *, last: bool) -> None:
    """A whole answer, as the stream its client asked for. Raises what `Reply.relay` does."""
    body, error = await answer.gather(response, tap)
    if error is not None:
        answer.record.evidence(more=True)
        try:
            raise error
        finally:
            del error
    if not answer.down.status and (tap.refusal is not None or tap.fault is not None):
        await _refuse(answer, response, tap, None, last=last)
        return
    _over(answer, tap, None)
    headers = [item for item in answer.their_headers(response) if item[0] != b"content-type"]
    await answer.down.start(response.status, answer.our_headers([*headers, (b"content-type", content_type.encode())]))
    await _end(answer, response, tap, body, whole=True)


async def _last_byte(answer: Answer, response: UpstreamResponse, tap: Tap) -> None:
    """The terminal frame's last line may end in CRLF, of which the LF has not been read."""
    with contextlib.suppress(TimeoutError, UpstreamFailed):
        async with asyncio.timeout(_FINISH_SECONDS):
            await answer.last_byte(response, tap)


async def _refuse(answer: Answer, response: UpstreamResponse, tap: Tap, error: ApiError | None, *, last: bool) -> None:
    """A stream that was over before it said anything: nothing was sent, so the error can have its own status."""
    if tap.refusal is None:
        answer.record.evidence(more=True)
        try:
            raise error or UpstreamFailed("there is no answer of the backend's to pass on", code=tap.fault)
        finally:
            del error
    status = status_of(tap.refusal)
    if not last and retryable(status):
        raise Declined(f"the backend's stream began with an error {status}", status)
    answer.refused = status
    answer.over()
    answer.blame(status)
    refusal = await shaped(answer, status, answer.record.secret.mask(tap.refusal, error=True))
    answer.record.show(refusal)
    answer.record.evidence()
    headers = [item for item in answer.their_headers(response) if item[0] != b"content-type"]
    await deliver(answer, status, [*headers, (b"content-type", b"application/json")], refusal)


def _over(answer: Answer, tap: Tap, error: ApiError | None) -> None:
    """Nothing more is read of an answer."""
    answer.broken = error is not None or tap.failed or tap.cut or tap.erred or tap.fault is not None
    answer.over()


async def _end(answer: Answer, response: UpstreamResponse, tap: Tap, rest: bytes, *, whole: bool) -> None:
    """What is left of a stream; the inline verdict goes before the terminal frame."""
    await answer.show(rest + tap.done)
    answer.record.evidence()
    if tap.cut:
        # An end without the last chunk is an error to every client.
        await answer.down.write(rest)
        return
    if answer.generation.mode == "inline" and answer.generation.verifiable and whole and not tap.failed:
        if rest:
            await answer.down.write(rest)
        # The backend's connection does not wait with the client.
        await _finish(answer, response)
        rest = inline.comment(public(await answer.verdict()))
    await answer.down.write(rest + tap.done, last=True)


async def _finish(answer: Answer, response: UpstreamResponse) -> None:
    """Once: nothing of an answer comes any more."""
    if not answer.finished:
        answer.finished = True
        plain = isinstance(answer.decoder, Identity)
        answer.services.transport.unasked += await finish(response, _FINISH_SECONDS, plain=plain)


def _unsent(tap: Tap) -> bool:
    """Whether all that a stream has to show so far is an error."""
    return tap.refusal is not None or (tap.fault is not None and not tap.begun)
