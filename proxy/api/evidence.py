"""Evidence bundles over HTTP: for the key that asked, for admins, and for whoever a key's record lets read them."""

from __future__ import annotations

from collections.abc import Callable
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
MOST_SHOWN = 4 * 1024 * 1024
"""Bytes of a bundle that is judged again here: streams have to be served meanwhile."""


@router.get("/v1/verifications/{id}/evidence")
async def evidence(id: str, services: TheServices, client: TheClient, wait: Wait = 0.0) -> Response:
    """One file that shows a third party what was asked, served, claimed and found (`countersign verify`).

    `wait` is how many seconds to wait for the verdict, without which there is no bundle.
    """
    name = f'attachment; filename="{id}{bundle.SUFFIX}"'
    data = await _made(id, services, client, wait, lambda data, _: data)
    return Response(data, media_type=bundle.MEDIA_TYPE, headers={**HEADERS, "content-disposition": name})


@router.get("/v1/verifications/{id}/report")
async def report(id: str, services: TheServices, client: TheClient, wait: Wait = 0.0) -> Response:
    """The same for people: the answer's tokens by how far claim and replay differ, and what the numbers mean."""
    text = await _made(id, services, client, wait, _page)
    return Response(text, media_type="text/html", headers=PAGE_HEADERS)


def _page(data: bytes, keys: jws.Keys) -> bytes:
    if len(data) > MOST_SHOWN:
        words = "the evidence of this answer is too large to be shown here; `countersign verify --html` shows it"
        raise NotFound(words, code="evidence_too_large")
    return page(examine(data, keys))


async def _made(
    id: str, services: Services, client: Client, wait: float, make: Callable[[bytes, jws.Keys], bytes]
) -> bytes:
    """What is made of a bundle, in a thread. Raises PermissionDenied and NotFound, StoreUnavailable and StoreFailed."""
    if client.evidence == "none":
        raise PermissionDenied("this key may not read evidence")
    owner = await services.store.owner(id) if client.evidence == "all" else client.owner
    verification = await services.store.told(id, owner, wait)
    if verification["status"] == "pending":
        raise NotFound("there is no evidence yet: its verdict is pending", code="evidence_pending")
    keys = jws.keys_in(orjson.loads(await services.receipts.published()))
    return await services.receipts.ask(lambda log: make(bundle_of(log, id, keys, services.sealer), keys), large=True)
