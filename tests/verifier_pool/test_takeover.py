"""Redis as an earlier release left it: standings, verdicts and what was open go on under today's names."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from redis import Redis

from tests.support import redises
from tests.verifier_pool import rig
from tests.verifier_pool.toy import ToyReference, answer, settings
from verifier_pool import worker
from verifier_pool.link import connection
from verifier_pool.link.queue import (
    AUDIT_SECRET,
    OPEN,
    OUTBOX,
    PREFIX,
    STANDINGS,
    VERIFY_QUEUE,
    WEBHOOK_QUEUE,
    evidence_key,
    units_key,
    verdict_key,
    waiting_key,
)
from verifier_pool.store import Store
from verifier_pool.sweeper import sweep
from verifier_pool.takeover import OLD, take_over


def aged(redis: Redis) -> None:
    """Give everything its old name; today's jobs go."""
    for key in list(redis.scan_iter(match=PREFIX + "*")):
        if key.startswith((PREFIX + "rq:").encode()):
            redis.delete(key)
        else:
            redis.rename(key, OLD.encode() + key[len(PREFIX) :])


def test_nothing_left_is_nothing_done(redis: Redis) -> None:
    redis.set(AUDIT_SECRET, b"new")
    redis.set("other:countersign:audit-secret", b"other")
    redis.set("rq:queues", b"another program's")
    before = sorted(redis.keys())
    assert take_over(redis) == 0
    assert sorted(redis.keys()) == before


def test_what_waited_is_verified_and_what_was_known_is_known(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    evidence = answer()
    rig.submit(redis, rules, [evidence])
    redis.set(AUDIT_SECRET, b"s" * 32)
    redis.hset(STANDINGS, "honest:d", b"{}")
    redis.set(verdict_key("v"), b"{}", ex=1000)
    redis.zadd(OPEN, {evidence.id: time.time() + 60})
    aged(redis)
    redis.rpush(f"rq:queue:{VERIFY_QUEUE}", evidence.id)
    redis.hset(f"rq:job:{evidence.id}", "data", b"")
    redis.zadd(f"rq:scheduled:{WEBHOOK_QUEUE}", {"webhook-aa": 1, "webhook-event-bb": 2})
    redis.zadd(f"rq:wip:{WEBHOOK_QUEUE}", {"webhook-cc:123": 1})
    redis.zadd(f"rq:failed:{WEBHOOK_QUEUE}", {"webhook-dd": 1})
    redis.lpush("rq:queue:strange", "theirs")
    redis.sadd("rq:queues", "rq:queue:strange", f"rq:queue:{VERIFY_QUEUE}", f"rq:queue:{WEBHOOK_QUEUE}")
    assert take_over(redis) >= 5
    left = {key for key in redis.scan_iter() if not key.startswith(PREFIX.encode())}
    assert left == {b"rq:queue:strange", b"rq:queues"}
    assert redis.smembers("rq:queues") == {b"rq:queue:strange"}
    assert redis.get(AUDIT_SECRET) == b"s" * 32
    assert redis.hgetall(STANDINGS) == {b"honest:d": b"{}"}
    assert 900 < redis.ttl(verdict_key("v")) <= 1000
    assert redis.exists(evidence_key(evidence.id))
    assert set(redis.zrange(OUTBOX, 0, -1)) == {b"aa", b"event:bb", b"cc"}
    assert take_over(redis) == 0
    # Without a job of its own the generation ends all the same.
    sweep(Store(redis, verdict_ttl=1000), rules.verification, time.time() + rules.verification.lost_after + 1)
    rig.worker(redis, rules, {"toy": ToyReference()}).serve(burst=True)
    assert rig.verdict_of(redis, evidence.id)
    assert redis.zcard(OPEN) == 0


def test_a_worker_takes_over_before_it_makes_a_secret_of_its_own(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    redis.set(OLD + "audit-secret", b"s" * 32)
    config = tmp_path / "countersign.yaml"
    backend = {"name": "honest", "url": "http://127.0.0.1:9", "model": "toy"}
    config.write_text(yaml.safe_dump({"redis_url": valkey_url, "models": {"toy": {}}, "backends": [backend]}))
    assert worker.main(["--only", "verify", "--burst", "--config", str(config)]) == 0
    assert redis.get(AUDIT_SECRET) == b"s" * 32
    assert redis.keys(OLD + "*") == []


def test_what_both_releases_wrote_is_joined(redis: Redis) -> None:
    redis.set(AUDIT_SECRET, b"new")
    redis.zadd(OPEN, {"a": 5, "b": 5})
    redis.zadd(waiting_key("x"), {"n": 1})
    redis.expire(waiting_key("x"), 500)
    redis.hset(STANDINGS, mapping={"x": "new"})
    redis.rpush(units_key("x"), "3", "4")
    redis.set(PREFIX + "strange", b"")
    redis.set(OLD + "audit-secret", b"old")
    redis.zadd(OLD + "open", {"a": 9, "c": 1})
    redis.zadd(OLD + "waiting:x", {"o": 1})
    redis.hset(OLD + "standings", mapping={"x": "old", "y": "old"})
    redis.rpush(OLD + "units:x", "1", "2")
    redis.sadd(OLD + "unfolded", "x")
    redis.sadd(OLD + "strange", "x")
    take_over(redis)
    assert redis.keys(OLD + "*") == []
    assert redis.get(AUDIT_SECRET) == b"new"
    assert redis.zrange(OPEN, 0, -1, withscores=True) == [(b"c", 1.0), (b"b", 5.0), (b"a", 9.0)]
    assert redis.zrange(waiting_key("x"), 0, -1) == [b"n", b"o"]
    assert 400 < redis.ttl(waiting_key("x")) <= 500
    assert redis.hgetall(STANDINGS) == {b"x": b"new", b"y": b"old"}
    assert redis.lrange(units_key("x"), 0, -1) == [b"1", b"2", b"3", b"4"]
    assert redis.smembers(PREFIX + "unfolded") == {b"x"}


def test_many_keys(redis: Redis) -> None:
    for number in range(1234):
        redis.set(f"{OLD}verdict:{number}", number, ex=1000)
    redis.set(OLD + "audit-secret", b"old")
    assert take_over(redis) == 1235
    assert redis.dbsize() == 1235
    assert redis.get(verdict_key("1233")) == b"1233"


@pytest.mark.parametrize("keys", [[], [OLD + "*"], [OLD + "*", "rq:*"]])
def test_a_user_who_may_not_see_all_of_it_is_left_in_peace(
    redis: Redis, keys: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    redis.set(OLD + "audit-secret", b"old")
    redis.acl_setuser(
        "narrow", reset=True, enabled=True, passwords=["+pw"], keys=[PREFIX + "*", *keys], commands=["+@all"]
    )
    try:
        path = redis.connection_pool.connection_kwargs["path"]
        with Redis(unix_socket_path=path, username="narrow", password="pw") as narrow:
            assert take_over(narrow) == (len(keys) == 2)
    finally:
        redis.acl_deluser("narrow")
    assert ("may not touch" in caplog.text) == (len(keys) == 1)


def test_a_cluster_is_left_in_peace(tmp_path: Path) -> None:
    with redises.cluster(tmp_path) as place, connection.connect(place.url) as client:
        assert connection.of_cluster(client)
        assert take_over(client) == 0
        client.set(AUDIT_SECRET, b"new")


def test_one_server_is_no_cluster() -> None:
    assert not connection.of_cluster(connection.connect("redis://127.0.0.1:1"))
    assert not connection.of_cluster(connection.connect("redis+sentinel://127.0.0.1:1/name"))
