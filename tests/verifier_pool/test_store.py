from __future__ import annotations

import threading
import time

import orjson
from redis import Redis

from policies.verification import public, unverified
from tests.support.waiting import PATIENCE
from tests.verifier_pool.toy import settings
from verifier_pool.link.queue import OPEN, OUTBOX, VERDICTS, evidence_key, intent_key, verdict_key
from verifier_pool.store import Store

ID = "a" * 32


def store(redis: Redis, webhook: bool = False) -> Store:
    return Store(redis, verdict_ttl=100, webhook=webhook)


def test_the_first_verdict_wins_closes_and_announces(redis: Redis) -> None:
    redis.zadd(OPEN, {ID: 1})
    redis.set(intent_key(ID), b'{"id":"x"}', ex=9999)
    listener = redis.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
    listener.subscribe(VERDICTS)
    listener.get_message(timeout=PATIENCE)
    assert store(redis).settle(unverified(ID, "first", None, 5.0), None)
    assert not store(redis).settle(unverified(ID, "second", None, 6.0), None)
    verdict = store(redis).verdict(ID)
    assert verdict is not None
    assert verdict["reasons"] == ["first"]
    assert redis.zcard(OPEN) == 0
    assert 0 < redis.ttl(verdict_key(ID)) <= 100
    assert 0 < redis.ttl(intent_key(ID)) <= 300
    message = listener.get_message(timeout=PATIENCE)
    assert message is not None
    assert message["data"] == ID.encode()
    assert listener.get_message(timeout=0.05) is None
    listener.close()


def test_only_the_winner_fills_the_outbox(redis: Redis) -> None:
    hooked = store(redis, webhook=True)
    assert hooked.settle(unverified(ID, "first", None, 5.5), None)
    assert hooked.outbox(10) == [ID]
    hooked.sent(ID)
    assert not hooked.settle(unverified(ID, "second", None, 6.0), None)
    assert redis.zcard(OUTBOX) == 0
    assert store(redis).settle(unverified("b" * 32, "no webhook", None, 5.5), None)
    assert redis.zcard(OUTBOX) == 0


def test_many_writers_one_verdict(redis: Redis) -> None:
    wins: list[int] = []

    def write(number: int) -> None:
        if store(redis).settle(unverified(ID, str(number), None, 1.0), None):
            wins.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    verdict = store(redis).verdict(ID)
    assert verdict is not None
    assert verdict["reasons"] == [str(wins[0])]


def test_a_closed_id_cannot_be_postponed_back_to_life(redis: Redis) -> None:
    here = store(redis)
    here.postpone(ID, time.time())
    assert redis.zcard(OPEN) == 0
    redis.zadd(OPEN, {ID: 1, "b" * 32: 2**40})
    assert here.overdue(time.time(), 10) == [ID]
    here.postpone(ID, 2**40)
    assert here.overdue(time.time(), 10) == []


def test_unverified_takes_what_the_intent_knows(redis: Redis) -> None:
    redis.set(intent_key(ID), orjson.dumps({"owner": "o", "backend": "b", "model": "m", "created": 3.0}))
    here = store(redis)
    verification = unverified(ID, "proxy_lost", here.intent(ID), 9.0)
    assert (verification["owner"], verification["backend"], verification["model"]) == ("o", "b", "m")
    assert (verification["created"], verification["decided"]) == (3.0, 9.0)
    assert "owner" not in public(verification)
    assert unverified(ID, "proxy_lost", None, 9.0)["owner"] == ""


def test_unreadable_documents_are_none(redis: Redis) -> None:
    for junk in (b"", b"{", b"[1]", b"\xff"):
        redis.set(intent_key(ID), junk)
        assert store(redis).intent(ID) is None
    assert store(redis).evidence(ID) is None
    redis.set(evidence_key(ID), b"x")
    assert store(redis).evidence(ID) == b"x"


def test_all_workers_share_one_audit_secret(redis: Redis) -> None:
    first, second = store(redis).audit_secret(), store(redis).audit_secret()
    assert first == second
    assert len(first) == 32
    assert settings("redis://x").audit.secret is None
