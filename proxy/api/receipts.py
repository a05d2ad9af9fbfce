"""Receipts, the keys they are signed with, and the log that all of them are in."""

from __future__ import annotations

import contextlib
import logging
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from policies import jws
from policies.errors import NotFound
from policies.receipt import KIND
from proxy.api.routes import LONGEST_WAIT, TheClient, TheServices, client_of
from verifier_pool.link.durable import NotDurable
from verifier_pool.link.log import Log, Proof
from verifier_pool.link.receipts import Stored, receipt_of

FRESH_SECONDS = 1.0
"""How old a head may be, although the log has grown, when somebody asks for the latest."""
_CACHED = {"cache-control": "public, max-age=60"}

logger = logging.getLogger(__name__)

router = APIRouter()


async def reader_of(request: Request, services: TheServices) -> None:
    """Whether who is asking may look at the log. Raises AuthenticationFailed and KeysUnavailable."""
    if not services.settings.receipts.public_log:
        await client_of(request, services)


Number = Annotated[int, Query(ge=0, lt=2**53)]
AReader = Depends(reader_of)


@router.get("/.well-known/countersign-keys.json")
async def keys(services: TheServices) -> Response:
    """The public keys that receipts and heads are signed with, as a JWK set, for anybody."""
    return Response(await services.receipts.published(), media_type="application/jwk-set+json", headers=_CACHED)


@router.get("/v1/verifications/{id}/receipt")
async def receipt(
    id: str,
    services: TheServices,
    client: TheClient,
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT, allow_inf_nan=False)] = 0.0,
) -> dict[str, Any]:
    """The receipt of one response, with what shows it in the log, for the key that made the request and nobody else.

    `wait` is how many seconds to wait for the verdict, without which there is no receipt.
    """
    verification = await services.store.told(id, client.owner, wait)
    if verification["status"] == "pending":
        raise NotFound("there is no receipt yet: its verdict is pending", code="receipt_pending")
    found = await services.receipts.ask(lambda log: _proven(log, id))
    if found is None:
        raise NotFound("there is no receipt of this verification", code="no_receipt")
    stored, proof = found
    shown: dict[str, Any] = {"index": stored.number, "head": None, "proof": None}
    if proof is not None:
        shown |= {"head": proof.head.token, "proof": [each.hex() for each in proof.path]}
    return {"id": id, "object": "receipt", "receipt": stored.token, "log": shown}


@router.get("/v1/log/head", dependencies=[AReader])
async def head(services: TheServices, covering: Number = 0) -> dict[str, Any]:
    """The latest signed head of the log, of `covering` receipts at least."""
    found = await services.receipts.ask(lambda log: log.head(covering, FRESH_SECONDS))
    if found is None:
        raise NotFound("nothing is in the log yet", code="empty_log")
    return {"object": "log.head", "size": found.size, "head": found.token}


@router.get("/v1/log/proof", dependencies=[AReader])
async def proof(services: TheServices, index: Number, size: Number) -> dict[str, Any]:
    """What shows that the leaf `index` is in the log of `size` leaves."""
    leaf, path = await services.receipts.ask(lambda log: (log.leaf(index), log.inclusion(index, size)))
    shown = [each.hex() for each in path]
    return {"object": "log.proof", "index": index, "size": size, "leaf": leaf.hex(), "proof": shown}


@router.get("/v1/log/consistency", dependencies=[AReader])
async def consistency(services: TheServices, first: Number, second: Number) -> dict[str, Any]:
    """What shows that the log of `second` leaves begins with that of `first`."""
    path = await services.receipts.ask(lambda log: log.consistency(first, second))
    return {"object": "log.consistency", "first": first, "second": second, "proof": [each.hex() for each in path]}


@router.get("/v1/log/entries", dependencies=[AReader])
async def entries(services: TheServices, start: Number, end: Number) -> dict[str, Any]:
    """Leaf hashes from `start` up to below `end`, or fewer: the next call goes on at the `end` of the answer.

    A leaf hash tells nothing of its receipt to whoever does not have it.
    """
    found = await services.receipts.ask(lambda log: log.entries(start, end))
    return {
        "object": "log.entries",
        "start": start,
        "end": start + len(found),
        "leaves": [each.hex() for each in found],
    }


def _proven(log: Log, id: str) -> tuple[Stored, Proof | None] | None:
    """The receipt, and its proof unless the log is not durable enough to be shown right now."""
    stored = receipt_of(log.redis, id)
    if stored is None:
        return None
    # Whoever asks for the keys next is to find this one among them.
    kid = jws.kid_in(stored.token, KIND)
    if not log.signer.knows(kid):
        said = "a receipt's key is not published: is receipts.signing_keys (or public_keys) the same everywhere?"
        logger.error(said, extra={"id": id, "kid": kid})
    with contextlib.suppress(NotDurable):
        return stored, log.proof(stored)
    return stored, None
