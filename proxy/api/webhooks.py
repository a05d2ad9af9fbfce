"""Webhooks over HTTP: register, change, try and remove them, see how they do. A key has its own; admins see all."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request

from policies.errors import InvalidRequest
from proxy.api.asking import body_of
from proxy.api.auth import THIS_MACHINE, Client
from proxy.api.routes import TheClient, TheServices
from proxy.services import Services
from verifier_pool.link import receivers
from verifier_pool.link.endpoints import OVERLAP
from verifier_pool.link.receivers import Asker, House

MOST_WAIT = 30.0
_MOST_LISTED = 500
_MOST_NUMBER = 2**53
_FIELDS = '{"url": text, "events": [text, …], "models": […], "verdicts": […], "everyone": true or false, "description"}'

router = APIRouter()


class _Registered(msgspec.Struct, forbid_unknown_fields=True):
    """A webhook to be registered; an empty list is everything."""

    url: str
    events: list[str] = []
    models: list[str] = []
    verdicts: list[str] = []
    everyone: bool = False
    description: str = ""


class _Overlap(msgspec.Struct, forbid_unknown_fields=True):
    """How long the present secret signs beside the new one."""

    overlap: float = OVERLAP


class _Which(msgspec.Struct, forbid_unknown_fields=True):
    """Deliveries: those of these ids, or all that failed."""

    ids: list[str] = []
    failed: bool = False


def house_of(services: Services) -> House:
    """Where webhooks are kept."""
    return House(services.hands.redis, services.settings, services.sealer)


def asker_of(client: Client) -> Asker:
    """Who asks. Without keys this machine is the operator, and so is whoever may use the admin API."""
    owner = "" if client.id in ("", THIS_MACHINE) else client.owner
    return Asker(client.actor, owner, client.name if owner else "", client.admin)


async def tried(services: Services, asker: Asker, id: str, wait: float) -> dict[str, Any]:
    """An event that tries a webhook, with what became of it within `wait` seconds."""
    hands, house = services.hands, house_of(services)
    sent = await hands.do(receivers.tried, house, asker, id)
    status = await hands.poll(
        lambda: receivers.status(house.redis, sent["delivery"]), lambda found: found not in receivers.UNDECIDED, wait
    )
    return {**sent, "status": status}


@router.get("")
async def listed(services: TheServices, client: TheClient) -> dict[str, Any]:
    """The key's webhooks, or for an admin all."""
    data = await services.hands.do(receivers.listed, house_of(services), asker_of(client))
    return {"object": "list", "data": data}


@router.post("", status_code=201)
async def register(request: Request, services: TheServices, client: TheClient) -> dict[str, Any]:
    """Register a webhook; it is sent an event to try it. Its secret is in this answer and in no other."""
    wanted = msgspec.to_builtins(await body_of(request, _Registered, _FIELDS))
    url = wanted.pop("url")
    return await services.hands.do(receivers.register, house_of(services), asker_of(client), url, wanted)


@router.get("/{id}")
async def one(id: str, services: TheServices, client: TheClient) -> dict[str, Any]:
    """One webhook, and how it does."""
    return await services.hands.do(receivers.shown, house_of(services), asker_of(client), id)


@router.patch("/{id}")
async def change(id: str, request: Request, services: TheServices, client: TheClient) -> dict[str, Any]:
    """Give it another URL or other filters: those that the body names."""
    fields = await body_of(request, dict[str, Any], _FIELDS)
    return await services.hands.do(receivers.changed, house_of(services), asker_of(client), id, fields)


@router.delete("/{id}")
async def remove(id: str, services: TheServices, client: TheClient) -> dict[str, Any]:
    """Drop it, with what waits for it."""
    await services.hands.do(receivers.removed, house_of(services), asker_of(client), id)
    return {"object": "webhook", "id": id, "deleted": True}


@router.post("/{id}/rotate")
async def rotate(id: str, request: Request, services: TheServices, client: TheClient) -> dict[str, Any]:
    """Another secret, in this answer and in no other; the present one signs beside it for `overlap` seconds."""
    overlap = (await body_of(request, _Overlap, '{"overlap": seconds}')).overlap
    return await services.hands.do(receivers.rotated, house_of(services), asker_of(client), id, overlap)


@router.post("/{id}/test", status_code=202)
async def attempt(
    id: str,
    services: TheServices,
    client: TheClient,
    wait: Annotated[float, Query(ge=0, le=MOST_WAIT, allow_inf_nan=False)] = 10.0,
) -> dict[str, Any]:
    """Send an event that says nothing, as any other is sent, and see what becomes of it within `wait` seconds."""
    return await tried(services, asker_of(client), id, wait)


@router.post("/{id}/resume")
async def resume(id: str, services: TheServices, client: TheClient) -> dict[str, Any]:
    """Send to it again after it was switched off."""
    return await services.hands.do(receivers.resumed, house_of(services), asker_of(client), id)


@router.get("/{id}/deliveries")
async def log(
    id: str,
    services: TheServices,
    client: TheClient,
    limit: Annotated[int, Query(ge=1, le=_MOST_LISTED)] = 50,
    before: Annotated[int | None, Query(ge=0, le=_MOST_NUMBER)] = None,
    status: Literal["waiting", "sending", "retrying", "delivered", "failed"] | None = None,
) -> dict[str, Any]:
    """Its deliveries, the latest first, with every try; `before` is a sequence number."""
    house, which = house_of(services), {"limit": limit, "before": before, "status": status}
    data = await services.hands.do(receivers.log, house, asker_of(client), id, **which)
    return {"object": "list", "data": data, "has_more": len(data) == limit}


@router.post("/{id}/replay")
async def replay(id: str, request: Request, services: TheServices, client: TheClient) -> dict[str, Any]:
    """Send deliveries again that are over, with the same id and the same bytes."""
    which = await body_of(request, _Which, '{"ids": [text, …]} or {"failed": true}')
    if bool(which.ids) == which.failed:
        raise InvalidRequest("name `ids`, or say `failed`", param="ids")
    ids = None if which.failed else which.ids
    data = await services.hands.do(receivers.replayed, house_of(services), asker_of(client), id, ids)
    return {"object": "list", "data": data}
