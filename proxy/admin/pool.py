"""The workers for admins: queues and what failed in them, profiles they judge by, and the webhook."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response

from policies.errors import InvalidRequest, NotFound
from proxy.admin.asking import Desk, TheAdmin, TheDesk
from proxy.admin.auth import Admin
from proxy.api.asking import body_of
from proxy.api.webhooks import MOST_WAIT, house_of, tried
from verifier_pool.link import letters, orders, queues, receivers, running
from verifier_pool.link.endpoints import SETTINGS
from verifier_pool.link.queue import WEBHOOK_QUEUE, queue_of
from verifier_pool.link.receivers import Asker

router = APIRouter(prefix="/admin")


class _Which(msgspec.Struct, forbid_unknown_fields=True):
    """Dead letters: those of these ids, or all."""

    ids: list[str] = []
    all: bool = False


@router.get("/queues")
async def every_queue(desk: TheDesk, admin: TheAdmin) -> dict[str, Any]:
    """What waits, runs and failed in every queue, which is one of a kind of work or of one model's reference."""
    return await desk.hands.do(_queues, desk)


@router.post("/queues/requeue")
async def requeue(request: Request, desk: TheDesk, admin: TheAdmin, response: Response) -> dict[str, Any]:
    """Queue dead letters anew. 202 where no worker came round to it in time."""
    return await _act(request, desk, admin, response, "requeue")


@router.post("/queues/drop")
async def drop(request: Request, desk: TheDesk, admin: TheAdmin, response: Response) -> dict[str, Any]:
    """Drop dead letters; likewise."""
    return await _act(request, desk, admin, response, "drop")


async def _act(request: Request, desk: Desk, admin: Admin, response: Response, action: orders.Action) -> dict[str, Any]:
    which = await body_of(request, _Which, '{"ids": [text, …]} or {"all": true}')
    if bool(which.ids) == which.all:
        raise InvalidRequest("name `ids`, or say `all`", param="ids")
    redis = desk.hands.redis
    id = await desk.hands.do(orders.give, redis, action, None if which.all else which.ids, admin.actor)
    done = await desk.hands.poll(lambda: orders.done(redis, id), lambda found: found is not None, orders.PATIENCE)
    if done is None:
        response.status_code = 202
        return {"object": "order", "id": id, "status": "waiting", "data": []}
    return {"object": "order", "id": id, "status": "done", "data": done}


@router.get("/profiles")
async def profiles(desk: TheDesk, admin: TheAdmin) -> dict[str, Any]:
    """The profile of every model, as the workers say that they judge by, and what each lacks."""
    data = await desk.hands.do(running.profiles, desk.hands.redis, desk.services.settings)
    return {"object": "list", "data": data}


@router.get("/profiles/{model:path}")
async def profile(model: str, desk: TheDesk, admin: TheAdmin) -> dict[str, Any]:
    """One model's."""
    found = await desk.hands.do(running.profiles, desk.hands.redis, desk.services.settings)
    for each in found:
        if each["model"] == model:
            return each
    raise NotFound("the settings have no such model", code="model_not_found")


@router.get("/webhooks/failures")
async def failures(desk: TheDesk, admin: TheAdmin) -> dict[str, Any]:
    """Deliveries that failed for good; `POST /admin/queues/requeue` sends them again."""
    found = await desk.hands.do(letters.find, desk.hands.redis)
    data = [letters.shown(each, time.time()) for each in found if each.queue == WEBHOOK_QUEUE]
    return {"object": "list", "data": data}


@router.post("/webhooks/test", status_code=202)
async def attempt(
    desk: TheDesk, admin: TheAdmin, wait: Annotated[float, Query(ge=0, le=MOST_WAIT, allow_inf_nan=False)] = 10.0
) -> dict[str, Any]:
    """Try the webhook of the settings, see `proxy.api.webhooks.attempt`."""
    return await tried(desk.services, Asker(admin.actor), SETTINGS, wait)


@router.post("/webhooks/resume")
async def resume(desk: TheDesk, admin: TheAdmin) -> dict[str, Any]:
    """Send to the webhook of the settings again after it was switched off."""
    return await desk.hands.do(receivers.resumed, house_of(desk.services), Asker(admin.actor), SETTINGS)


def _queues(desk: Desk) -> dict[str, Any]:
    now, redis, models = time.time(), desk.hands.redis, dict[str, str]()
    for model in desk.services.settings.models:
        models |= {queue_of(model): model, queue_of(model, second=True): model}
    found = [{**each, "model": models.get(each["queue"])} for each in queues.described(redis, now)]
    return {"object": "list", "data": found, "dead": [letters.shown(each, now) for each in letters.find(redis)]}
