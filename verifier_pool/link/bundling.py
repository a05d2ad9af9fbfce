"""An evidence bundle, put together from what lies in Redis about a response (`policies.bundle`)."""

from __future__ import annotations

from typing import cast

from redis import Redis

from policies import bundle, case, jws
from policies.bundle import Place
from policies.errors import BundleError, NotFound, StoreFailed
from policies.receipt import verify_receipt
from verifier_pool.link.durable import NotDurable
from verifier_pool.link.log import Log
from verifier_pool.link.queue import case_key, evidence_key, part_key
from verifier_pool.link.receipts import receipt_of
from verifier_pool.link.sealing import Sealer

GONE = "no_evidence"
_GONE_WORDS = "there is no evidence of this answer: nothing was checked, it was not to be kept, or its time is over"


def bundle_of(log: Log, id: str, keys: jws.Keys, sealer: Sealer) -> bytes:
    """The bundle of a response that has its verdict. Redis's own errors pass through.

    Args:
        keys: that receipts are signed with, by `kid`.

    Raises:
        NotFound: `no_receipt`, `no_evidence` or `evidence_too_large`.
        StoreFailed: the log cannot be shown right now, or what is stored is damaged.
        SealError: what is stored cannot be opened.
    """
    redis, stored = log.redis, receipt_of(log.redis, id)
    if stored is None:
        raise NotFound("there is no receipt of this verification", code="no_receipt")
    named = verify_receipt(stored.token, keys, id=id).hashes["replay"]
    places = [evidence_key(id), case_key(id, named or "")]
    sizes = [int(redis.strlen(place)) for place in places]
    if not named or not all(sizes):
        raise NotFound(_GONE_WORDS, code=GONE)
    if sum(sizes) > bundle.MAX_BYTES:
        raise NotFound("the evidence of this answer is too large for a bundle", code="evidence_too_large")
    evidence, found = (_opened(redis, place, sealer) for place in places)
    try:
        parts = [_part(redis, name) for name in case.unpack(found).named]
        proof = log.proof(stored)
        place = Place(stored.number, proof.head.token, tuple(proof.path))
        return bundle.make(stored.token, place, keys.values(), evidence, found, parts)
    except NotDurable as error:
        raise StoreFailed("the log cannot be shown right now; try again soon") from error
    except BundleError as error:
        raise StoreFailed(f"no bundle of this answer can be made: {error}") from error


def _opened(redis: Redis, key: str, sealer: Sealer) -> bytes:
    stored = cast("bytes | None", redis.get(key))
    if stored is None:
        raise NotFound(_GONE_WORDS, code=GONE)
    return sealer.open(stored, key.encode())


def _part(redis: Redis, name: str) -> bytes:
    part = cast("bytes | None", redis.get(part_key(name)))
    if part is None:
        raise NotFound(_GONE_WORDS, code=GONE)
    return part
