"""The log: heads, proofs and entries, from leaves alone; and a head promises only what a crash leaves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import pytest
from redis import Redis

from policies import jws, merkle
from policies.errors import NotFound, ReceiptError
from policies.head import Head, follow, verify_head, verify_inclusion
from policies.settings import DurabilitySettings
from tests.verifier_pool.link.test_receipts import settle
from verifier_pool.link import durable
from verifier_pool.link.log import MOST_ENTRIES, Log
from verifier_pool.link.receipts import LAST, LOG, TILE, Stored, receipt_of, tiles_key
from verifier_pool.link.signing import RECEIPT_KEYS, Signer


def leaf(number: int) -> bytes:
    return merkle.leaf(str(number).encode())


def fill(redis: Redis, size: int) -> list[bytes]:
    """A log of so many leaves, as the script leaves it."""
    leaves = [leaf(number) for number in range(size)]
    pipeline = redis.pipeline()
    pipeline.hset(LOG, mapping={"id": "5f" * 16, "size": size})
    whole = size // TILE
    for tile in range(whole):
        pipeline.hset(tiles_key(0), str(tile), b"".join(leaves[tile * TILE : (tile + 1) * TILE]))
    pipeline.delete(LAST)
    if size % TILE:
        pipeline.set(LAST, b"".join(leaves[whole * TILE :]))
    pipeline.execute()
    return leaves


def log_of(redis: Redis, rules: DurabilitySettings | None = None) -> Log:
    return Log(redis, Signer(redis), rules)


def opened(log: Log, token: str) -> Head:
    keys = jws.keys_in(jws.jwk_set(Signer(log.redis).published()))
    return verify_head(token, keys)


def test_heads_and_proofs_of_a_log_of_many_tiles(redis: Redis) -> None:
    size = 70_000  # over 256 tiles, so that there are tiles of tiles of tiles
    leaves = fill(redis, size)
    log = log_of(redis)
    found = log.head()
    assert found is not None
    head = opened(log, found.token)
    assert (head.log, head.size, found.size) == ("5f" * 16, size, size)
    assert head.root == merkle.root(leaves)
    for index in (0, 1, 255, 256, 65_535, 65_536, 69_999):
        verify_inclusion(head, leaves[index], index, log.inclusion(index, size))
    for first in (0, 1, 255, 256, 257, 65_535, 65_536, 65_537, 69_999, 70_000):
        assert merkle.grows(first, merkle.root(leaves[:first]), size, head.root, log.consistency(first, size))
    assert redis.hlen(tiles_key(1)) == 2
    assert redis.hlen(tiles_key(2)) == 1


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 512, 700])
def test_every_size_around_a_tile(redis: Redis, size: int) -> None:
    leaves = fill(redis, size)
    log = log_of(redis)
    for smaller in {1, size // 2, size - 1, size} - {0}:
        assert log.root(smaller) == merkle.root(leaves[:smaller])
        for index in {0, smaller // 2, smaller - 1}:
            path = log.inclusion(index, smaller)
            assert merkle.includes(merkle.root(leaves[:smaller]), smaller, index, leaves[index], path)
    assert log.entries(0, size) == leaves
    assert log.entries(size // 2, size) == leaves[size // 2 :]


def test_inner_hashes_grow_with_the_log(redis: Redis) -> None:
    log = log_of(redis)
    before: Head | None = None
    for size in (100, 300, 513, 514, 1500):
        leaves = fill(redis, size)
        found = log.head()
        assert found is not None
        head = opened(log, found.token)
        assert head.root == merkle.root(leaves)
        path = log.consistency(before.size, head.size) if before else []
        before = follow(before, head, path)
        assert before is head


def test_entries_come_in_parts(redis: Redis) -> None:
    leaves = fill(redis, 3000)
    log = log_of(redis)
    found: list[bytes] = []
    while len(found) < 3000:
        part = log.entries(len(found), 3000)
        assert 0 < len(part) <= MOST_ENTRIES
        found += part
    assert found == leaves
    assert log.entries(5, 5) == []


def test_what_is_not_there_is_not_found(redis: Redis) -> None:
    log = log_of(redis)
    assert log.head() is None
    log.keep(0.0)
    fill(redis, 3)
    for ask in (
        lambda: log.head(4),
        lambda: log.inclusion(3, 3),
        lambda: log.inclusion(0, 4),
        lambda: log.consistency(2, 4),
        lambda: log.consistency(3, 2),
        lambda: log.entries(0, 4),
        lambda: log.leaf(3),
    ):
        with pytest.raises(NotFound):
            ask()


def test_a_head_is_signed_when_one_is_due(redis: Redis) -> None:
    fill(redis, 3)
    log = log_of(redis)
    first = log.head()
    assert log.head() == log.head(3) == first
    fill(redis, 5)
    assert log.head(seconds=math.inf) == first
    later = log.head(4, seconds=math.inf)
    assert later is not None
    assert later.size == 5
    log.keep(1000.0)
    assert log.head(seconds=math.inf) == later
    # One whose key is not published any more is worth nothing.
    redis.delete(RECEIPT_KEYS)
    other = log_of(redis).head(seconds=math.inf)
    assert other is not None
    assert opened(log, other.token).kid != opened_kid(later.token)


def opened_kid(token: str) -> str:
    return jws.kid_in(token, "countersign-head")


def test_a_receipt_is_proven(redis: Redis) -> None:
    signer = Signer(redis)
    for number in range(5):
        settle(redis, number, signer)
    log = Log(redis, signer)
    for number in range(5):
        stored = cast(Stored, receipt_of(redis, f"{number:032x}"))
        proof = log.proof(stored)
        head = opened(log, proof.head.token)
        verify_inclusion(head, merkle.leaf(stored.token.encode()), stored.number, proof.path)


def test_a_log_that_lost_leaves_signs_nothing(redis: Redis) -> None:
    fill(redis, 300)
    redis.delete(LAST)
    log = log_of(redis)
    with pytest.raises(ReceiptError, match="lost leaves"):
        log.head()


def test_an_older_head_never_takes_the_place_of_a_newer_one(redis: Redis) -> None:
    fill(redis, 3)
    log = log_of(redis)
    slow = log.state()
    fill(redis, 5)
    newer = log.head()
    older = log._sign(slow)  # a process that had read the size before, and signs only now
    assert (older.size, log.head()) == (3, newer)
    # And to a client that pins the newer it is an old one, and no log that shrank.
    pinned, seen = opened(log, cast(str, newer and newer.token)), opened(log, older.token)
    assert follow(pinned, seen, log.consistency(3, 5)) is pinned


def test_leaves_are_durable_before_a_head_is_shown(redis: Redis, tmp_path: Path) -> None:
    fill(redis, 3)
    # A Redis without a file promises nothing and loses the log with all else, so nothing is waited for…
    assert log_of(redis).head() is not None
    fill(redis, 4)
    # …unless the settings say that there is one, or replicas.
    for rules in (DurabilitySettings(aof=True, timeout=0.05), DurabilitySettings(replicas=1, timeout=0.05)):
        with pytest.raises(durable.NotDurable):
            log_of(redis, rules).head()
    assert log_of(redis).state().head_size == 3
    redis.config_set("appendonly", "yes")
    try:
        found = log_of(redis).head()
        assert found is not None
        assert found.size == 4
    finally:
        redis.config_set("appendonly", "no")


def test_a_key_that_is_gone_signs_no_head(redis: Redis) -> None:
    fill(redis, 3)
    log = log_of(redis)
    first = log.head()
    redis.delete(RECEIPT_KEYS)
    fill(redis, 4)
    second = log.head()  # the process still holds the key
    assert first is not None
    assert second is not None
    assert opened(log, second.token).size == 4
    assert opened_kid(first.token) != opened_kid(second.token)
