"""Backends for admins: what there is, what each is told to be, and what is decided about it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from policies.errors import InvalidRequest, NotFound
from policies.settings import BackendSettings
from policies.standing import ACTIONS
from policies.unit import declaration_of
from proxy.admin.asking import Desk, TheAdmin, TheDesk
from proxy.admin.auth import Admin
from proxy.api import standing
from proxy.api.asking import fields_of, unsure, why_of
from proxy.api.backends import now
from proxy.api.routes import TheServices
from proxy.api.standing import TheBackend
from proxy.backends.backend import Backend
from proxy.services import check_backend
from verifier_pool.link import overlays
from verifier_pool.link.durable import NotDurable

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")

router = APIRouter(prefix="/admin/backends")
router.include_router(standing.router)


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
async def one(desk: TheDesk, admin: TheAdmin, backend: TheBackend) -> dict[str, Any]:
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


@router.get("/{name}/standing/history")
async def history(name: str, desk: TheDesk, admin: TheAdmin) -> dict[str, Any]:
    """Its records under all declarations there were, the latest life first; also of a backend that is gone."""
    found = await desk.services.records.history(name)
    if not found and desk.services.backends.named(name) is None:
        raise NotFound("there is no such backend, and none has a record", code="backend_not_found")
    return {"object": "list", "data": found}


@router.post("/{name}/{action}")
async def decide(
    request: Request,
    services: TheServices,
    admin: standing.Admin,
    backend: TheBackend,
    action: str,
    response: Response,
) -> dict[str, Any]:
    """The same as `POST /{name}/standing`, by the path."""
    if action not in ACTIONS:
        raise NotFound("there is nothing at this path", code="unknown_path")
    return await standing.decided(services, admin, response, backend, action, await why_of(request))


async def _do(
    desk: Desk, admin: Admin, response: Response, name: str, work: Callable[[overlays.Desk], object]
) -> dict[str, Any]:
    """Change a backend at Redis; this proxy then knows, and others within two seconds.

    Returns the backend as it was written. 202 where that does not hold here yet (`holds`), or may be lost in a crash
    (`durable`).
    """
    following, durable = desk.following, True
    at = overlays.Desk(desk.hands.redis, following.declared, admin.actor, desk.services.sealer, _check)
    try:
        await desk.hands.do(work, at)
    except NotDurable:
        durable = False
    heard = await following.look()
    known, written = desk.services.backends.named(name), at.written
    holds = heard and name not in following.merged.left_out and (known is None) == (written is None)
    if not holds:
        response.status_code = 202
    said = {"holds": holds} | ({} if durable else unsure(response))
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
        **now(backend),
    }
