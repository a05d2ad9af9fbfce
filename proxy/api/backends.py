"""Backends and their standing: for admin keys only, since whoever knows its audit rate knows when to cheat."""

from __future__ import annotations

import contextlib
import logging
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Request

from policies.errors import InvalidRequest, NotFound, PermissionDenied, StoreUnavailable
from policies.record import Record
from policies.standing import LONGEST_WHY, visible
from policies.unit import declaration_of
from proxy.api.auth import Client
from proxy.api.routes import TheClient, TheServices
from proxy.backends.backend import Backend
from proxy.relay.asgi import ClientLeft, read_body
from proxy.services import Services, header_map
from verifier_pool.link import trail

logger = logging.getLogger(__name__)

_MOST_BYTES = 16 * 1024
_NOTE = "redis.call('XADD', KEYS[1], 'MAXLEN', ARGV[1], '*', 'entry', ARGV[2])"

router = APIRouter(prefix="/v1/backends")


class _Override(msgspec.Struct, forbid_unknown_fields=True):
    """What the operator decides: see `policies.standing.override`."""

    action: Literal["quarantine", "pardon", "release"]
    why: str


_override = msgspec.json.Decoder(_Override)


def admin_of(client: TheClient) -> Client:
    """An admin. Raises PermissionDenied, which is the same whatever was asked for."""
    if not client.admin:
        raise PermissionDenied("this is for admin keys")
    return client


def backend_of(name: str, services: TheServices, admin: Annotated[Client, Depends(admin_of)]) -> Backend:
    """The backend that the path names, for an admin. Raises NotFound."""
    backend = services.backends.named(name)
    if backend is None:
        raise NotFound("there is no such backend", code="backend_not_found")
    return backend


Admin = Annotated[Client, Depends(admin_of)]
TheBackend = Annotated[Backend, Depends(backend_of)]


@router.get("")
async def backends(services: TheServices, admin: Admin) -> dict[str, Any]:
    """Every backend with its state and health, as this proxy routes by them."""
    return {"object": "list", "data": [_entry(backend) for backend in services.backends.all]}


@router.get("/{name}/standing")
async def standing(services: TheServices, backend: TheBackend) -> dict[str, Any]:
    """Everything there is to show of a backend's record under its present declaration."""
    return await services.records.summary(backend)


@router.post("/{name}/standing")
async def override(request: Request, services: TheServices, admin: Admin, backend: TheBackend) -> dict[str, Any]:
    """Quarantine a backend by hand, release it again, or pardon it; the reason goes into its audit trail."""
    asked = await _read(request)
    record = await _decided(services, admin, backend, asked)
    logger.warning(
        "a backend's standing was overridden",
        extra={"backend": backend.name, "action": asked.action, "by": admin.name, "state": record.state},
    )
    await _see(services)
    return services.records.show(record)


async def _decided(services: Services, admin: Client, backend: Backend, asked: _Override) -> Record:
    """Do it; the audit log has it, what was refused as well."""
    why, before = asked.why.strip(), {"state": backend.standing.state}
    try:
        return await services.records.override(backend, asked.action, by=admin.name, why=why, actor=admin.actor)
    except Exception as error:
        named = (admin.actor, f"standing.{asked.action}", backend.name)
        said = trail.entry(*named, before=before, result=str(error) or type(error).__name__, why=why)
        arguments: list[str | int] = [services.settings.admin.audit_entries, said]
        try:
            await services.store.call(services.store.script(_NOTE), [trail.TRAIL], arguments)
        except StoreUnavailable:
            logger.warning("the audit log cannot be written", extra={"audit": said})
        raise


async def _read(request: Request) -> _Override:
    """The body, read only once the key is known to be an admin's.

    It has to call itself JSON. A web page from elsewhere cannot send that: its browser asks this proxy first, which
    never allows it. A page whose name was made to lead to this machine is not asked; without keys `Keys.client`
    refuses it by its Host, and with keys it knows none.
    """
    headers = header_map(request.scope["headers"])
    if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
        raise InvalidRequest("the content-type is application/json")
    try:
        body = await read_body(request.receive, headers, _MOST_BYTES)
    except ClientLeft as error:
        raise InvalidRequest("the request body did not arrive") from error
    try:
        asked = _override.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest('the body is {"action": "quarantine" | "pardon" | "release", "why": text}') from error
    if not asked.why.strip():
        raise InvalidRequest("say why: it goes into the audit trail", param="why")
    if not visible(asked.why):
        expected = f"at most {LONGEST_WHY} characters, on one line, without control or formatting characters"
        raise InvalidRequest(f"`why` is {expected}", param="why")
    return asked


async def _see(services: Services) -> None:
    """Route by the new state at once, not within the next second."""
    with contextlib.suppress(StoreUnavailable):
        await services.standings.refresh()


def _entry(backend: Backend) -> dict[str, Any]:
    return {
        "id": backend.name,
        "object": "backend",
        "model": backend.settings.model,
        "declaration": declaration_of(backend.settings),
        "state": backend.standing.state,
        "since": backend.standing.since,
        "audit_rate": backend.standing.audit_rate,
        "outstanding": backend.outstanding,
        "max_concurrency": backend.settings.max_concurrency,
        "health": backend.health(),
    }
