"""What every admin endpoint needs: who asks, the running proxy, and a body that is bounded and JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Request

from policies.errors import AuthenticationFailed, InvalidRequest, PermissionDenied, RateLimited
from policies.standing import LONGEST_WHY, visible
from proxy.admin.auth import Admin, AdminKeys
from proxy.admin.hands import Hands
from proxy.following import Following
from proxy.relay.asgi import ClientLeft, read_body
from proxy.services import Services, header_map

MOST_BYTES = 64 * 1024
_READS = frozenset(("GET", "HEAD"))

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Desk:
    """What admins work with: a running proxy, hands at Redis, and who is let in."""

    following: Following
    hands: Hands
    keys: AdminKeys

    @property
    def services(self) -> Services:
        """The parts of the running proxy."""
        return self.following.services


def desk_of(request: Request) -> Desk:
    """What the endpoint works with."""
    desk = request.app.state.desk
    assert isinstance(desk, Desk)
    return desk


def admin_of(request: Request, desk: Annotated[Desk, Depends(desk_of)]) -> Admin:
    """Who asks. Raises AuthenticationFailed, RateLimited, and PermissionDenied where a key may only look."""
    headers = header_map(request.scope["headers"])
    try:
        admin = desk.keys.authenticate(desk.following.declared.admin.keys, headers, request.scope["client"])
    except (AuthenticationFailed, RateLimited) as error:
        desk.services.metrics.admin_refused.add(1, {"reason": error.error_code or error.type})
        raise
    if admin.read_only and request.method not in _READS:
        raise PermissionDenied("this key may look, and change nothing")
    return admin


TheDesk = Annotated[Desk, Depends(desk_of)]
TheAdmin = Annotated[Admin, Depends(admin_of)]


class Why(msgspec.Struct, forbid_unknown_fields=True):
    """Why something is decided."""

    why: str


async def body_of(request: Request, shape: type[T], expected: str) -> T:
    """The body, read once it is known that an admin asks.

    It has to call itself JSON, which a web page from elsewhere cannot. Raises InvalidRequest, RequestTooLarge.
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
    why = text.strip()
    if not why:
        raise InvalidRequest("say why: it goes into the audit trail", param="why")
    if not visible(why):
        expected = f"at most {LONGEST_WHY} characters, on one line, without control or formatting characters"
        raise InvalidRequest(f"`why` is {expected}", param="why")
    return why
