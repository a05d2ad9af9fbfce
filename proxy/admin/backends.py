"""Backends for admins: what there is, what each is told to be, and what is decided about it."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from policies.errors import InvalidRequest, NotFound, StoreUnavailable
from policies.settings import BackendSettings
from policies.standing import ACTIONS
from policies.unit import declaration_of
from proxy.admin.asking import Desk, TheAdmin, TheDesk, body_of, desk_of, fields_of, reason, why_of
from proxy.admin.auth import Admin
from proxy.backends.backend import Backend
from proxy.services import check_backend
from verifier_pool.link import overlays, trail
from verifier_pool.link.durable import NotDurable

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")

router = APIRouter(prefix="/admin/backends")


class _Decision(msgspec.Struct, forbid_unknown_fields=True):
    """What is decided about a backend's standing: see `policies.standing.override`."""

    action: Literal["quarantine", "pardon", "release"]
    why: str


def backend_of(name: str, desk: Annotated[Desk, Depends(desk_of)], admin: TheAdmin) -> Backend:
    """The backend that the path names, for an admin. Raises NotFound."""
    backend = desk.services.backends.named(name)
    if backend is None:
        raise NotFound("there is no such backend", code="backend_not_found")
    return backend


TheBackend = Annotated[Backend, Depends(backend_of)]


@router.get("")
async def listed(desk: TheDesk, admin: TheAdmin) -> dict[str, Any]:
    """Every backend with its settings, state and health, as this proxy routes by them."""
    data = [_entry(desk, backend) for backend in desk.services.backends.all]
    return {"object": "list", "data": data, "left_out": dict(desk.following.merged.left_out)}


@router.post("", status_code=201)
async def add(request: Request, desk: TheDesk, admin: TheAdmin, response: Response) -> dict[str, Any]:
    """Another backend."""
    fields = await fields_of(request)
    name = fields.pop("name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest("`name` is made of letters, digits and ._-", param="name")
    return await _do(desk, admin, response, name, lambda at: at.add(name, fields))


@router.get("/{name}")
async def one(desk: TheDesk, backend: TheBackend) -> dict[str, Any]:
    """One backend."""
    return _entry(desk, backend)


@router.patch("/{name}")
async def change(name: str, request: Request, desk: TheDesk, admin: TheAdmin, response: Response) -> dict[str, Any]:
    """Other settings; those that are not named stay."""
    fields = await fields_of(request)
    if "name" in fields:
        raise InvalidRequest("another name is another backend", param="name")
    return await _do(desk, admin, response, name, lambda at: at.change(name, fields))


@router.delete("/{name}")
async def remove(name: str, desk: TheDesk, admin: TheAdmin, response: Response) -> dict[str, Any]:
    """No such backend any more, whatever the file says; what runs there is finished."""
    return await _do(desk, admin, response, name, lambda at: at.remove(name))


@router.put("/{name}/declaration")
async def declare(name: str, request: Request, desk: TheDesk, admin: TheAdmin, response: Response) -> dict[str, Any]:
    """What it runs, from here on."""
    fields = await fields_of(request)
    return await _do(desk, admin, response, name, lambda at: at.declare(name, fields))


@router.post("/{name}/drain")
async def drain(name: str, desk: TheDesk, admin: TheAdmin, response: Response) -> dict[str, Any]:
    """No new requests."""
    return await _do(desk, admin, response, name, lambda at: at.drain(name))


@router.post("/{name}/undrain")
async def undrain(name: str, desk: TheDesk, admin: TheAdmin, response: Response) -> dict[str, Any]:
    """Requests again."""
    return await _do(desk, admin, response, name, lambda at: at.drain(name, drained=False))


@router.post("/{name}/reset")
async def reset(name: str, desk: TheDesk, admin: TheAdmin, response: Response) -> dict[str, Any]:
    """What the file says, and nothing else; a backend that it does not name is gone."""
    return await _do(desk, admin, response, name, lambda at: at.reset(name))


@router.get("/{name}/standing")
async def standing(desk: TheDesk, backend: TheBackend) -> dict[str, Any]:
    """Everything there is to show of its record under its present declaration, with its audit trail."""
    return await desk.services.records.summary(backend)


@router.get("/{name}/standing/history")
async def history(name: str, desk: TheDesk, admin: TheAdmin) -> dict[str, Any]:
    """Its records under all declarations there were, the latest life first; also of a backend that is gone."""
    found = await desk.services.records.history(name)
    if not found and desk.services.backends.named(name) is None:
        raise NotFound("there is no such backend, and none has a record", code="backend_not_found")
    return {"object": "list", "data": found}


@router.post("/{name}/standing")
async def decide(request: Request, desk: TheDesk, admin: TheAdmin, backend: TheBackend) -> dict[str, Any]:
    """Quarantine it by hand, release it again, or pardon it."""
    asked = await body_of(request, _Decision, '{"action": "quarantine" | "pardon" | "release", "why": text}')
    return await _decided(desk, admin, backend, asked.action, reason(asked.why))


@router.post("/{name}/{action}")
async def decide_in_path(
    request: Request, desk: TheDesk, admin: TheAdmin, backend: TheBackend, action: str
) -> dict[str, Any]:
    """The same, by the path."""
    if action not in ACTIONS:
        raise NotFound("there is nothing at this path", code="unknown_path")
    return await _decided(desk, admin, backend, action, await why_of(request))


async def _decided(desk: Desk, admin: Admin, backend: Backend, action: str, why: str) -> dict[str, Any]:
    """Override a backend's standing; the audit log has it, what was refused as well. Raises what `Records.override`
    does."""
    services, before = desk.services, {"state": backend.standing.state}
    try:
        record = await services.records.override(backend, action, by=admin.name, why=why, actor=admin.actor)
    except Exception as error:
        result = str(error) or type(error).__name__
        said = trail.entry(admin.actor, f"standing.{action}", backend.name, before=before, result=result, why=why)
        try:
            await desk.hands.do(trail.append, desk.hands.redis, services.settings.admin.audit_entries, said)
        except StoreUnavailable:
            logger.warning("the audit log cannot be written", extra={"audit": said})
        raise
    with contextlib.suppress(StoreUnavailable):
        await services.standings.refresh()
    return services.records.show(record)


async def _do(
    desk: Desk, admin: Admin, response: Response, name: str, work: Callable[[overlays.Desk], object]
) -> dict[str, Any]:
    """Change a backend at Redis; this proxy then knows, and others within two seconds.

    Returns the backend as it was written. 202 where that does not hold here yet (`holds`), or may be lost in a crash
    (`durable`).
    """
    following, durable = desk.following, True
    at = overlays.Desk(desk.hands.redis, following.declared, admin.actor, _check)
    try:
        await desk.hands.do(work, at)
    except NotDurable:
        durable = False
    heard = await following.look()
    known, written = desk.services.backends.named(name), at.written
    holds = heard and name not in following.merged.left_out and (known is None) == (written is None)
    if not (holds and durable):
        response.status_code = 202
    said = {"holds": holds} | ({} if durable else {"durable": False, "note": trail.MAYBE_LOST})
    if written is None:
        return {"id": name, "object": "backend", "deleted": True, **said}
    if holds and known is not None:
        return _entry(desk, known) | said
    return _described(written) | said


def _check(backend: BackendSettings) -> None:
    check_backend(backend, "backend")


def _described(backend: BackendSettings) -> dict[str, Any]:
    return {
        "id": backend.name,
        "object": "backend",
        "model": backend.model,
        "declaration": declaration_of(backend),
        "settings": overlays.described(backend),
        "drained": backend.drained,
    }


def _entry(desk: Desk, backend: Backend) -> dict[str, Any]:
    return _described(backend.settings) | {
        "from": desk.following.merged.sources.get(backend.name, "settings"),
        "state": backend.standing.state,
        "since": backend.standing.since,
        "audit_rate": backend.standing.audit_rate,
        "outstanding": backend.outstanding,
        "health": backend.health(),
    }
