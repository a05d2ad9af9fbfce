"""What endpoints for admins share, of whichever API: a body that is bounded and JSON, a reason, an unsure success."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response

from policies.errors import InvalidRequest
from policies.standing import LONGEST_WHY, visible
from proxy.relay.asgi import ClientLeft, read_body
from proxy.services import header_map
from verifier_pool.link import trail

MOST_BYTES = 64 * 1024

T = TypeVar("T")


class Why(msgspec.Struct, forbid_unknown_fields=True):
    """Why something is decided."""

    why: str


async def body_of(request: Request, shape: type[T], expected: str) -> T:
    """The body, read once it is known that an admin asks.

    It has to call itself JSON. A web page from elsewhere cannot send that: its browser asks this proxy first, which
    never allows it. A page whose name was made to lead to this machine is not asked; without keys it is refused by its
    Host, and with keys it knows none.

    Raises InvalidRequest, which says what is `expected`, and RequestTooLarge.
    """
    headers = header_map(request.scope["headers"])
    if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
        raise InvalidRequest("the content-type is application/json")
    try:
        return msgspec.json.decode(await read_body(request.receive, headers, MOST_BYTES), type=shape)
    except ClientLeft as error:
        raise InvalidRequest("the request body did not arrive") from error
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is {expected}") from error


async def fields_of(request: Request) -> dict[str, Any]:
    """A body that names settings."""
    return await body_of(request, dict[str, Any], "a JSON object of settings")


async def why_of(request: Request) -> str:
    """A body that says why, as the audit trail takes it."""
    return reason((await body_of(request, Why, '{"why": text}')).why)


def reason(text: str) -> str:
    """A reason, as the audit trail takes it. Raises InvalidRequest."""
    if not text.strip():
        raise InvalidRequest("say why: it goes into the audit trail", param="why")
    if not visible(text):
        expected = f"at most {LONGEST_WHY} characters, on one line, without control or formatting characters"
        raise InvalidRequest(f"`why` is {expected}", param="why")
    return text.strip()


def unsure(response: Response) -> dict[str, Any]:
    """What an answer says besides where a thing was done that Redis may lose in a crash; its status is then 202."""
    response.status_code = 202
    return {"durable": False, "note": trail.MAYBE_LOST}
