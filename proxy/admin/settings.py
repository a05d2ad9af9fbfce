"""Settings as they hold, in every process, and the audit log."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Query

from policies.errors import InvalidRequest
from proxy.admin.asking import Desk, TheAdmin, TheDesk
from proxy.admin.auth import Admin
from verifier_pool.link import running, trail

_ID = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")

router = APIRouter(prefix="/admin")


@router.get("/settings")
async def settings(desk: TheDesk, admin: TheAdmin) -> dict[str, Any]:
    """What this proxy's settings file is up to, and that of every process that runs."""
    return await desk.hands.do(_settings, desk)


@router.post("/settings/reload", status_code=202)
async def reload(desk: TheDesk, admin: TheAdmin) -> dict[str, Any]:
    """Have every process read its settings file and its profiles anew; this one has when it answers."""
    return await _reload(desk, admin)


@router.post("/profiles/reload", status_code=202)
async def reload_profiles(desk: TheDesk, admin: TheAdmin) -> dict[str, Any]:
    """The same: workers read their profiles whenever they read their settings."""
    return await _reload(desk, admin)


@router.get("/audit")
async def audit(
    desk: TheDesk,
    admin: TheAdmin,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    before: str | None = None,
    actor: str = "",
    action: str = "",
    target: str = "",
) -> dict[str, Any]:
    """What admins changed, the latest first. `actor`, `action` and `target` are what those of an entry begin with."""
    if before is not None and not _ID.fullmatch(before):
        raise InvalidRequest("`before` is the id of an entry", param="before")
    wanted = {name: text for name, text in (("actor", actor), ("action", action), ("target", target)) if text}
    found = await desk.hands.do(trail.read, desk.hands.redis, limit=limit, before=before, wanted=wanted)
    return {"object": "list", "data": found, "has_more": len(found) == limit}


async def _reload(desk: Desk, admin: Admin) -> dict[str, Any]:
    await desk.hands.do(running.ask, desk.hands.redis, admin.actor)
    await desk.following.look()
    return await desk.hands.do(_settings, desk)


def _settings(desk: Desk) -> dict[str, Any]:
    said = desk.following.said
    data = [running.described(each, said.asked) for each in running.processes(desk.hands.redis) if each.id != said.id]
    return {"object": "settings", "this": running.described(said), "others": data}
