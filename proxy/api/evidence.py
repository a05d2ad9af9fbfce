"""Evidence bundles over HTTP: for the key that asked, for admins, and for whoever a key's record lets read them."""

from __future__ import annotations

import asyncio
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Response

from policies import bundle, jws
from policies.errors import NotFound, PermissionDenied
from policies.examination import examine
from policies.report import CSP, page
from proxy.api.auth import Client
from proxy.api.routes import LONGEST_WAIT, TheClient, TheServices
from proxy.services import Services
from verifier_pool.link.bundling import bundle_of

HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
PAGE_HEADERS = {**HEADERS, "content-security-policy": f"{CSP}; frame-ancestors 'none'; sandbox"}

router = APIRouter()
Wait = Annotated[float, Query(ge=0, le=LONGEST_WAIT, allow_inf_nan=False)]
_turn = asyncio.Semaphore(2)
"""Bundles that are judged again at once: each takes a core for a while, and streams have to be served."""


@router.get("/v1/verifications/{id}/evidence")
async def evidence(id: str, services: TheServices, client: TheClient, wait: Wait = 0.0) -> Response:
    """One file that shows a third party what was asked, served, claimed and found (`countersign verify`).

    `wait` is how many seconds to wait for the verdict, without which there is no bundle.
    """
    name = f'attachment; filename="{id}{bundle.SUFFIX}"'
    data = await _bundle(id, services, client, wait)
    return Response(data, media_type=bundle.MEDIA_TYPE, headers={**HEADERS, "content-disposition": name})


@router.get("/v1/verifications/{id}/report")
async def report(id: str, services: TheServices, client: TheClient, wait: Wait = 0.0) -> Response:
    """The same for people: the answer's tokens by how far claim and replay differ, and what the numbers mean."""
    data = await _bundle(id, services, client, wait)
    keys = await _keys(services)
    async with _turn:
        text = await asyncio.to_thread(lambda: page(examine(data, keys)))
    return Response(text, media_type="text/html", headers=PAGE_HEADERS)


async def _bundle(id: str, services: Services, client: Client, wait: float) -> bytes:
    """Raises PermissionDenied and NotFound, StoreUnavailable and StoreFailed."""
    if client.evidence == "none":
        raise PermissionDenied("this key may not read evidence")
    owner = await services.store.owner(id) if client.evidence == "all" else client.owner
    verification = await services.store.told(id, owner, wait)
    if verification["status"] == "pending":
        raise NotFound("there is no evidence yet: its verdict is pending", code="evidence_pending")
    keys = await _keys(services)
    return await services.receipts.ask(lambda log: bundle_of(log, id, keys, services.sealer))


async def _keys(services: Services) -> dict[str, bytes]:
    return jws.keys_in(orjson.loads(await services.receipts.published()))
