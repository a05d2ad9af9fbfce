from __future__ import annotations

import threading
import time

import orjson
from redis import Redis

from policies import codec
from policies.evidence import Evidence, Sampling
from policies.jws import jwk_set, keys_in
from policies.receipt import Receipt, digest, seed_commitment, verify_receipt
from policies.verification import public, unverified
from tests.support.waiting import PATIENCE
from tests.verifier_pool.toy import settings
from verifier_pool.link.queue import OPEN, OUTBOX, VERDICTS, evidence_key, intent_key, verdict_key
from verifier_pool.link.receipts import receipt_of
from verifier_pool.link.sealing import Sealer
from verifier_pool.link.signing import Signer
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


def _receipt(redis: Redis, id: str = ID) -> Receipt:
    stored, signer = receipt_of(redis, id), Signer(redis)
    assert stored is not None
    return verify_receipt(stored.token, keys_in(jwk_set(signer.published())), id=id)


def test_the_receipt_of_what_is_not_judged_names_what_was_served(redis: Redis) -> None:
    served, request = digest(b"served"), b'{"model": "m"}'
    choice = Evidence(ID, "chat", "b1", "m", Sampling(seed=5), runtime="r", request=request, shown_sha256=served)
    packed = codec.pack([choice])
    redis.set(intent_key(ID), orjson.dumps({"id": ID, "request_sha256": digest(b"asked")}))
    redis.set(evidence_key(ID), packed)
    store(redis).settle(unverified(ID, "job_failed", None, 5.0), None)
    found = _receipt(redis)
    said = {name: value for name, value in found.hashes.items() if value is not None}
    assert said == {
        "request": digest(b"asked"),
        "sent": digest(request),
        "served": served,
        "evidence": digest(packed),
    }
    assert found.statement["seed"] == seed_commitment(ID, [5])
    assert found.statement["declared"]["runtime"] == "r"


def test_the_receipt_of_what_cannot_be_read_names_that(redis: Redis) -> None:
    mine = codec.pack([Evidence(ID, "chat", "b1", "m", Sampling())])
    for number, damaged in enumerate((b"rubbish", mine[:-1], mine, b"")):
        id = f"{number:032x}"
        redis.set(evidence_key(id), damaged)  # the third is that of another response
        store(redis).settle(unverified(id, "evidence_unreadable", None, 5.0), None)
        said = {name: value for name, value in _receipt(redis, id).hashes.items() if value is not None}
        assert said == ({"evidence": digest(damaged)} if damaged else {})
    sealed = Sealer([bytes(32)]).seal(mine, evidence_key(ID).encode())
    redis.set(evidence_key(ID), sealed)
    store(redis).settle(unverified(ID, "job_failed", None, 5.0), None)
    assert set(_receipt(redis).hashes.values()) == {None}


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
