"""Verdict, receipt and leaf are stored in one step, whoever writes, whatever is killed when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import orjson
import pytest
from redis import Redis

from policies import jws, merkle
from policies.receipt import Facts, Receipt, verify_receipt
from policies.settings import ReceiptSettings
from policies.verification import unverified
from tests.verifier_pool.crashes import survives, together
from verifier_pool.link.log import Log
from verifier_pool.link.queue import verdict_key
from verifier_pool.link.receipts import LOG, Settler, receipt_key, receipt_of, stored_in
from verifier_pool.link.signing import RECEIPT_KEYS, RECEIPT_SIGNERS, Signer


def settle(redis: Redis, number: int, signer: Signer | None = None, facts: Facts | None = None) -> bool:
    """A verdict on response `number`."""
    verification = unverified(f"{number:032x}", "backlog", {"backend": "b", "owner": "o"}, 5.5)
    told = Settler(redis, signer or Signer(redis))
    return told.settle(verification, None, facts or Facts(), 100, webhook=False)


def verified(redis: Redis, number: int) -> Receipt:
    """Its receipt, by the published keys."""
    keys = jws.keys_in(jws.jwk_set(Signer(redis).published()))
    stored = receipt_of(redis, f"{number:032x}")
    assert stored is not None
    found = verify_receipt(stored.token, keys, id=f"{number:032x}")
    assert Log(redis, Signer(redis)).leaf(stored.number) == found.leaf
    return found


def audit(redis: Redis, most: int) -> int:
    """How many verdicts there are; each has its receipt, and each receipt is in the log once, and nothing else is."""
    ids = {number: f"{number:032x}" for number in range(most)}
    decided = [number for number, id in ids.items() if redis.exists(verdict_key(id))]
    leaves = sorted(verified(redis, number).leaf for number in decided)
    log = Log(redis, Signer(redis))
    assert sorted(log.entries(0, log.state().size)) == leaves
    assert not [
        number for number in range(most) if number not in decided and redis.exists(receipt_key(f"{number:032x}"))
    ]
    return len(decided)


def test_a_verdict_comes_with_its_receipt(redis: Redis) -> None:
    facts = Facts(request="a" * 64, declared={"runtime": "vllm-0.32-v2"})
    assert settle(redis, 7, facts=facts)
    found = verified(redis, 7)
    verdict = orjson.loads(cast(bytes, redis.get(verdict_key(found.id))))
    assert found.verification == {name: value for name, value in verdict.items() if name != "owner"}
    assert found.hashes["request"] == "a" * 64
    assert found.statement["declared"]["runtime"] == "vllm-0.32-v2"
    assert redis.ttl(receipt_key(found.id)) == pytest.approx(100, abs=5)
    assert redis.ttl(LOG) == -1


def test_a_second_verdict_leaves_nothing(redis: Redis) -> None:
    assert settle(redis, 0)
    first = receipt_of(redis, "0" * 32)
    assert not settle(redis, 0)
    assert receipt_of(redis, "0" * 32) == first
    assert audit(redis, 1) == 1


def test_leaves_are_numbered_in_order_over_tiles(redis: Redis) -> None:
    signer = Signer(redis)
    for number in range(520):
        assert settle(redis, number, signer)
    numbers = [cast(Any, receipt_of(redis, f"{number:032x}")).number for number in range(520)]
    assert numbers == list(range(520))
    assert Log(redis, signer).root(520) == merkle.root(Log(redis, signer).entries(0, 520))


def test_a_key_that_is_gone_signs_no_more(redis: Redis) -> None:
    signer = Signer(redis)
    assert settle(redis, 0, signer)
    gone = verified(redis, 0).kid
    redis.delete(RECEIPT_KEYS)
    # The process still holds the key. Its receipt could never be checked, so another is made, and published.
    assert settle(redis, 1, signer)
    assert verified(redis, 1).kid != gone
    redis.delete(RECEIPT_KEYS)
    assert not settle(redis, 1, signer)


def test_many_writers_and_one_receipt_each(redis: Redis, valkey_url: str) -> None:
    def work() -> None:
        with Redis.from_url(valkey_url) as mine:
            for number in range(60):
                settle(mine, number)

    together(work, work, work)
    assert audit(redis, 60) == 60


def test_whatever_is_killed_when(redis: Redis, valkey_url: str) -> None:
    """Two verdicts, by a process that dies before its n-th command, for every n: none lacks a receipt, or has two."""

    def work(first: int) -> Callable[[], object]:
        def run() -> None:
            with Redis.from_url(valkey_url) as mine:
                settle(mine, first)
                settle(mine, first + 1)

        return run

    command, first, whole = 0, 0, False
    while not whole:
        whole = survives(work(first), command)
        assert audit(redis, first + 2) >= first
        # Another process does what is left, as the sweeper does.
        with Redis.from_url(valkey_url) as other:
            settle(other, first)
            settle(other, first + 1)
        assert audit(redis, first + 2) == first + 2
        command, first = command + 1, first + 2
    assert command > 3


@pytest.mark.parametrize("junk", [None, b"", b"5", b"x y", b"5 ", b"-1 x", b"5 \xff"])
def test_what_is_no_receipt_is_none(junk: bytes | None) -> None:
    assert stored_in(junk) is None


def test_who_signs_with_a_key_that_is_not_published_is_known(redis: Redis) -> None:
    first, second = (jws.new_key() for _ in range(2))
    seeds = {each: jws.key_text(each.private_bytes_raw()) for each in (first, second)}
    signers = [Signer(redis, ReceiptSettings.model_validate({"signing_keys": seeds[each]})) for each in (first, second)]
    for number, signer in enumerate(signers):
        assert settle(redis, number, signer)
    kids = [jws.kid_of(jws.public_bytes(each)) for each in (first, second)]
    assert [each.unpublished(0.0) for each in signers] == [kids[1:], kids[:1]]
    assert signers[0].unpublished(2.0**40) == []
    signers[0].renew(ReceiptSettings(public_keys=(jws.key_text(jws.public_bytes(second)),)))
    assert signers[0].unpublished(0.0) == []
    assert sorted(Signer(redis).unpublished(0.0)) == sorted(kids)
    assert 0 < redis.ttl(RECEIPT_SIGNERS) <= 100
