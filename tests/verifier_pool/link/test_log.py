"""The log: heads, proofs and entries, from leaves alone; and a head promises only what a crash leaves."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis

from policies import jws, merkle, receipt
from policies.errors import ForkedLog, NotFound, ReceiptError
from policies.head import Head, follow, verify_head, verify_inclusion
from policies.settings import DurabilitySettings
from tests.support.redises import Server, wait_until
from tests.verifier_pool.link.test_receipts import settle
from verifier_pool.link import durable
from verifier_pool.link.log import MOST_ENTRIES, Log, State
from verifier_pool.link.receipts import LAST, LOG, TILE, Stored, receipt_of, tiles_key
from verifier_pool.link.signing import RECEIPT_KEYS, Signer


def leaf(number: int) -> bytes:
    return merkle.leaf(str(number).encode())


def run_of(redis: Redis) -> str:
    return str(cast(Any, redis.info("server"))["run_id"])


def fill(redis: Redis, size: int) -> list[bytes]:
    """A log of so many leaves, as the script leaves it."""
    leaves = [leaf(number) for number in range(size)]
    pipeline = redis.pipeline()
    pipeline.hset(LOG, mapping={"id": "5f" * 16, "size": size, "run": run_of(redis)})
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


def test_a_clock_that_steps_back_makes_no_log_look_forked(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(redis, 3)
    log, state = log_of(redis), Log.state

    def ahead(self: Log) -> State:
        found = state(self)
        return replace(found, now=found.now + 30.0)

    with monkeypatch.context() as patched:
        patched.setattr(Log, "state", ahead)
        before = log.head()
    fill(redis, 5)
    after, latest = log.head(5), log.head(seconds=1.0)
    assert before is not None
    assert after is not None
    assert (before.size, after.size, latest) == (3, 5, after)
    first, second = opened(log, before.token), opened(log, after.token)
    assert first.time < second.time
    assert follow(first, second, log.consistency(3, 5)) is second
    assert follow(second, first, log.consistency(3, 5)) is second


def test_leaves_are_durable_before_a_head_is_shown(redis: Redis, tmp_path: Path) -> None:
    fill(redis, 3)
    # A Redis without a file promises nothing, and after a restart the log is another one, so nothing is waited for…
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


@pytest.mark.parametrize("file", [False, True])
def test_a_redis_that_restarts_takes_no_head_back(tmp_path: Path, file: bool) -> None:
    """A snapshot is an earlier state of the log: what grows from there would convict an honest operator."""
    server = Server(tmp_path / "a", *(["--appendonly", "yes", "--appendfsync", "always"] if file else [])).start()
    try:
        with server.client() as redis:
            log = log_of(redis)
            for number in range(3):
                settle(redis, number)
            early = log.head()
            redis.save()
            settle(redis, 3)
            settle(redis, 4)
            found = log.head()
            assert early is not None
            assert found is not None
            before = opened(log, found.token)
        server.kill()
        server.start()
        with server.client() as redis:
            log = log_of(redis)
            assert log.outlives() == file
            assert log.state().size == (5 if file else 3)
            # What was signed of the earlier state is not shown any more either.
            shown = log.head(seconds=math.inf)
            assert shown is not None
            assert (shown == found) == file
            assert shown.token != early.token
            for number in range(5, 9):
                settle(redis, number)
            grown = log.head()
            assert grown is not None
            after = opened(log, grown.token)
            assert (after.log == before.log) == file
            path = log.consistency(before.size, after.size)
            if file:
                assert follow(before, after, path) is after
            else:
                with pytest.raises(ForkedLog, match="another log is shown"):
                    follow(before, after, path)
                path = log.consistency(shown.size, after.size)
                assert follow(opened(log, shown.token), after, path) is after
            stored = receipt_of(redis, "0" * 32)
            assert stored is not None
            proof = log.proof(stored)
            verify_inclusion(opened(log, proof.head.token), receipt.leaf_of(stored.token), stored.number, proof.path)
    finally:
        server.kill()


def test_a_replica_that_takes_over_may_lack_receipts(tmp_path: Path) -> None:
    first = Server(tmp_path / "a", "--appendonly", "yes").start()
    second = Server(tmp_path / "b", "--appendonly", "yes", "--replicaof", "127.0.0.1", str(first.port)).start()
    try:
        with first.client() as redis, second.client() as replica:
            settle(redis, 0)
            settle(redis, 1)
            before = log_of(redis).head()
            assert before is not None
            wait_until(lambda: log_of(replica).state().kept)
            first.kill()
            replica.replicaof("NO", "ONE")
            wait_until(lambda: cast(Any, replica.info("replication"))["role"] == "master")
            log = log_of(replica)
            after = log.head()
            assert after is not None
            assert opened(log, after.token).log != opened(log, before.token).log
            assert log.head() == after
    finally:
        first.kill()
        second.kill()


@pytest.mark.parametrize(("was_kept", "file"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_log_goes_on_after_a_restart_where_its_leaves_were_in_a_file(
    redis: Redis, was_kept: bool, file: bool
) -> None:
    fill(redis, 3)
    log = log_of(redis)
    try:
        redis.config_set("appendonly", "yes" if was_kept else "no")
        before = log.head()
        assert before is not None
        assert log.state().kept == was_kept
        redis.config_set("appendonly", "yes" if file else "no")
        redis.hset(LOG, "run", "0" * 40)
        after = log_of(redis).head()
        assert after is not None
        assert (opened(log, after.token).log == "5f" * 16) == (was_kept and file)
        assert log.state().log_run == run_of(redis)
        assert log_of(redis).head() == after
    finally:
        redis.config_set("appendonly", "no")


def test_a_restart_while_a_head_is_signed_is_noticed(redis: Redis) -> None:
    fill(redis, 3)
    log = log_of(redis)
    with pytest.raises(durable.NotDurable, match="restarted"):
        log._sign(replace(log.state(), run="0" * 40))
    assert log.state().head == ""


def test_a_redis_that_says_nothing_of_itself_needs_a_file(redis: Redis, valkey_url: str) -> None:
    redis.acl_setuser(
        "quiet", enabled=True, nopass=True, keys=["*"], channels=["*"], commands=["+@all", "-info"], reset=True
    )
    with Redis.from_url(valkey_url, username="quiet", password="x") as quiet:
        assert settle(quiet, 0)
        with pytest.raises(durable.NotDurable, match="INFO"):
            log_of(quiet).head()
        redis.config_set("appendonly", "yes")
        try:
            assert log_of(quiet).head() is not None
        finally:
            redis.config_set("appendonly", "no")
    redis.acl_deluser("quiet")


def test_another_log_begins_when_it_is_asked_for(redis: Redis) -> None:
    log = log_of(redis)
    with pytest.raises(NotFound):
        log.begin()
    leaves = fill(redis, 3)
    first = log.head()
    before, after = log.begin()
    assert before == "5f" * 16
    second = log.head(seconds=math.inf)
    assert first is not None
    assert second is not None
    assert opened(log, second.token).log == after != before
    assert opened(log, second.token).root == merkle.root(leaves)


def test_a_redis_without_room_shows_no_head(redis: Redis) -> None:
    fill(redis, 300)
    log = log_of(redis)
    assert log.head() is not None
    fill(redis, 600)
    redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(durable.NotDurable, match="no memory"):
            log.head()
        assert log.root(600) == merkle.root([leaf(number) for number in range(600)])
    finally:
        redis.config_set("maxmemory", 0)


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
