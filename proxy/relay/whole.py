"""An answer in one piece, with the verdict where the client asked for it; and a backend's error, as it came."""

from __future__ import annotations

from functools import partial

import orjson

from policies import withheld
from policies.errors import UpstreamFailed
from policies.verification import public
from proxy.generation import NO_ANSWER
from proxy.relay import headers as names
from proxy.relay import inline
from proxy.relay.answer import Answer, Headers
from proxy.relay.aside import sized
from proxy.relay.transport import UpstreamResponse
from proxy.tap.passed import error_event
from proxy.tap.types import Tap

_NO_CONTENT = 204
_FIELDS = {"message": "", "type": UpstreamFailed.type, "param": None, "code": None}


async def whole(answer: Answer, response: UpstreamResponse, tap: Tap) -> None:
    """Read it to its end, then pass it on. Raises what `Reply.relay` does."""
    body, failure = await answer.gather(response, tap)
    if failure is not None:
        answer.record.evidence(more=True)
        try:
            raise failure
        finally:
            # What was raised knows this frame: it, and the answer in it, would stay until garbage is collected.
            del failure
    body = await shaped(answer, response.status, body)
    await answer.show(body)
    answer.record.evidence()
    answer.over()
    headers = answer.their_headers(response)
    if answer.generation.mode == "inline" and answer.generation.verifiable:
        verification = await answer.verdict()
        word = verification["verdict"]
        if word == "reject" and answer.services.settings.verification.on_reject != "annotate":
            raise withheld.rejected(answer.generation.id)
        headers.append((names.VERDICT, str(word or verification["status"]).encode()))
        seen = await sized(len(body), partial(inline.add_verdict, body, public(verification)))
        body = seen or body
    await deliver(answer, response.status, headers, body)


async def error(answer: Answer, response: UpstreamResponse, tap: Tap) -> None:
    """A backend's error. Raises what `Reply.relay` does."""
    body, failure = await answer.gather(response, tap, answer.services.settings.bounds.error_bytes)
    if failure is not None:
        if answer.record.refusal is not None:
            # What the client does not get, over a bound or broken off, refuses nothing.
            answer.record.refusal = NO_ANSWER
        answer.record.evidence(more=True)
        try:
            raise failure
        finally:
            del failure
    body = await shaped(answer, response.status, body)
    await answer.show(body)
    answer.record.evidence()
    answer.over()
    await deliver(answer, response.status, answer.their_headers(response), body)


async def shaped(answer: Answer, status: int, body: bytes) -> bytes:
    """The body as its client gets it: as the last event of a stream where it has been promised one."""
    if not answer.down.pinged:
        return body
    return await sized(len(body), partial(_as_event, answer.generation.endpoint, status, body))


async def deliver(answer: Answer, status: int, headers: Headers, body: bytes) -> None:
    """The head, unless the client has been promised a stream, and the body, which is `shaped` by then."""
    if answer.down.pinged:
        await answer.down.write(body, last=True)
        return
    # An answer that has no content has no length either (RFC 9110 8.6).
    length = [] if status == _NO_CONTENT else [(b"content-length", str(len(body)).encode())]
    await answer.down.start(status, answer.our_headers([*headers, *length]))
    await answer.down.write(body, last=True)


def _as_event(path: str, status: int, body: bytes) -> bytes:
    """An answer that came too late for a status, as the last event of its stream."""
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        said = None
    if not isinstance(said, dict) or not isinstance(said.get("error"), dict):
        said = UpstreamFailed(f"the backend answered with status {status}").body()
    return error_event(path, UpstreamFailed("").body() | {"error": _FIELDS | said["error"]})
