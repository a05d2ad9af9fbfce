"""Standing for admins, the same on the public port and on the admin API's: a backend's record, and what is decided."""

from __future__ import annotations

import contextlib
import logging
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from policies.errors import NotFound, PermissionDenied, StoreUnavailable
from proxy.api.asking import body_of, reason, unsure
from proxy.api.auth import Client
from proxy.api.routes import TheClient, TheServices
from proxy.backends.backend import Backend
from proxy.services import Services
from verifier_pool.link import trail

logger = logging.getLogger(__name__)

Action = Literal["quarantine", "pardon", "release"]

_NOTE = "redis.call('XADD', KEYS[1], 'MAXLEN', ARGV[1], '*', 'entry', ARGV[2])"

router = APIRouter()


class _Decision(msgspec.Struct, forbid_unknown_fields=True):
    """What is decided about a backend's standing: see `policies.standing.override`."""

    action: Action
    why: str


def admin_of(client: TheClient) -> Client:
    """An admin. Raises PermissionDenied, which is the same whatever was asked for."""
    if not client.admin:
        raise PermissionDenied("this is for admin keys")
    return client


Admin = Annotated[Client, Depends(admin_of)]


def backend_of(name: str, services: TheServices, admin: Admin) -> Backend:
    """The backend that the path names, for an admin. Raises NotFound."""
    backend = services.backends.named(name)
    if backend is None:
        raise NotFound("there is no such backend", code="backend_not_found")
    return backend


TheBackend = Annotated[Backend, Depends(backend_of)]


@router.get("/{name}/standing")
async def standing(services: TheServices, backend: TheBackend) -> dict[str, Any]:
    """Everything there is to show of a backend's record under its present declaration, with its audit trail."""
    return await services.records.summary(backend)


@router.post("/{name}/standing")
async def decide(
    request: Request, services: TheServices, admin: Admin, backend: TheBackend, response: Response
) -> dict[str, Any]:
    """Quarantine a backend by hand, release it again, or pardon it; the reason goes into its audit trail."""
    asked = await body_of(request, _Decision, '{"action": "quarantine" | "pardon" | "release", "why": text}')
    return await decided(services, admin, response, backend, asked.action, reason(asked.why))


async def decided(
    services: Services, admin: Client, response: Response, backend: Backend, action: str, why: str
) -> dict[str, Any]:
    """Override a backend's standing; the audit log has it, what was refused as well. Returns its record, and whether
    that may still be lost. Raises what `Records.override` does."""
    before = {"state": backend.standing.state}
    try:
        made = await services.records.override(backend, action, by=admin.name, why=why, actor=admin.actor)
    except Exception as error:
        result = str(error) or type(error).__name__
        said = trail.entry(admin.actor, f"standing.{action}", backend.name, before=before, result=result, why=why)
        arguments: list[str | int] = [services.settings.admin.audit_entries, said]
        try:
            await services.store.call(services.store.script(_NOTE), [trail.TRAIL], arguments)
        except StoreUnavailable:
            logger.warning("the audit log cannot be written", extra={"audit": said})
        raise
    told = {"backend": backend.name, "action": action, "by": admin.name, "state": made.record.state}
    logger.warning("a backend's standing was overridden", extra=told)
    with contextlib.suppress(StoreUnavailable):
        # Route by it at once, not within the next second.
        await services.standings.refresh()
    return services.records.show(made.record) | ({} if made.durably else unsure(response))
