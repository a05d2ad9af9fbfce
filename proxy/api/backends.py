"""Backends and their standing: for admin keys only, since whoever knows its audit rate knows when to cheat."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from policies.unit import declaration_of
from proxy.api import standing
from proxy.api.routes import TheServices
from proxy.api.standing import Admin
from proxy.backends.backend import Backend

router = APIRouter(prefix="/v1/backends")
router.include_router(standing.router)


@router.get("")
async def backends(services: TheServices, admin: Admin) -> dict[str, Any]:
    """Every backend with its state and health, as this proxy routes by them."""
    return {"object": "list", "data": [_entry(backend) for backend in services.backends.all]}


def _entry(backend: Backend) -> dict[str, Any]:
    return {
        "id": backend.name,
        "object": "backend",
        "model": backend.settings.model,
        "declaration": declaration_of(backend.settings),
        "max_concurrency": backend.settings.max_concurrency,
        **now(backend),
    }


def now(backend: Backend) -> dict[str, Any]:
    """How a backend is doing, as this proxy routes by it."""
    return {
        "state": backend.standing.state,
        "since": backend.standing.since,
        "audit_rate": backend.standing.audit_rate,
        "outstanding": backend.outstanding,
        "health": backend.health(),
    }
