"""What every endpoint of the admin API needs: who asks, and the running proxy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from policies.errors import AuthenticationFailed, PermissionDenied, RateLimited
from proxy.admin.auth import Admin, AdminKeys
from proxy.admin.hands import Hands
from proxy.following import Following
from proxy.services import Services, header_map

_READS = frozenset(("GET", "HEAD"))


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
