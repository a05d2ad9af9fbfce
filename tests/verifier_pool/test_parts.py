"""What a verdict rests on is kept with it: as its receipt names it, for as long as it is to be kept, and no longer."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from redis import Redis

from policies import jws
from policies.errors import NotFound
from policies.evidence import Evidence
from policies.examination import Examination, Outcome, examine
from policies.receipt import NOTHING, verify_receipt
from policies.verification import Verification, unverified
from tests.verifier_pool import audits
from tests.verifier_pool.audits import Second, declared, lying, ready
from tests.verifier_pool.rig import submit
from tests.verifier_pool.toy import ToyReference, answer, failing
from verifier_pool import context
from verifier_pool.link.bundling import bundle_of
from verifier_pool.link.log import Log
from verifier_pool.link.queue import PREFIX, intent_key
from verifier_pool.link.receipts import Settler, receipt_of


def bundle(redis: Redis, id: str) -> bytes:
    """What the proxy would hand out."""
    store = context.current().store
    keys = {jws.kid_of(key): key for key in store.signer.published()}
    return bundle_of(Log(redis, store.signer), id, keys, store.sealer)


def examined(redis: Redis, id: str) -> Examination:
    keys = {jws.kid_of(key): key for key in context.current().store.signer.published()}
    return examine(bundle(redis, id), keys)


def kept(redis: Redis, kind: str) -> list[bytes]:
    return sorted(redis.scan_iter(f"{PREFIX}{kind}:*"))


CASES: dict[str, tuple[Evidence, dict[str, Any], str]] = {
    "replayed": (answer(length=48, kernels=40), {}, "pass"),
    "not chosen": (answer(length=48), {"audit": {"rate": 0.0}}, "unaudited"),
    "replayed for what its checks say": (lying(answer(length=48)), {"audit": {"rate": 0.0}}, "reject"),
    "another model": (answer(length=48, salt=1), {}, "reject"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_verdict_can_be_derived_again(redis: Redis, valkey_url: str, name: str) -> None:
    evidence, sections, verdict = CASES[name]
    rules = declared(valkey_url, **sections)
    pool = ready(redis, rules, ToyReference(), Second())
    verification, _ = audits.judged(pool, redis, rules, evidence)
    found = examined(redis, evidence.id)
    assert found.outcome is Outcome.VERIFIED, found.faults
    assert found.receipt is not None
    assert found.derived is not None
    assert (verification["verdict"], found.derived["verdict"]) == (verdict, verdict)
    assert ("extra_replay" in verification) == (name == "replayed for what its checks say")
    assert ("second_reference" in verification) == (name == "another model")


def test_a_replay_that_failed_is_told_too(redis: Redis, valkey_url: str) -> None:
    rules = declared(valkey_url)
    pool = ready(redis, rules, ToyReference(failing("too_long")))
    evidence = answer(length=48)
    audits.judged(pool, redis, rules, evidence)
    found = examined(redis, evidence.id)
    assert found.outcome is Outcome.VERIFIED, found.faults
    assert found.receipt is not None
    assert found.receipt.verification["reasons"] == ["too_long"]


def test_what_was_remembered_goes_along(redis: Redis, valkey_url: str) -> None:
    """A declaration that an answer contradicted changes later verdicts."""
    rules = declared(valkey_url, audit={"rate": 0.0})
    pool = ready(redis, rules)
    redis.hset(f"{PREFIX}declaration:honest", audits.RUNTIME, orjson.dumps({"fits": "x", "id": "y", "at": 1.0}))
    evidence = answer(length=48)
    audits.judged(pool, redis, rules, evidence)
    found = examined(redis, evidence.id)
    assert found.outcome is Outcome.VERIFIED, found.faults
    assert found.grounds is not None
    assert found.grounds.declaration_expired


@pytest.mark.parametrize(("retain", "evidence"), [("none", answer()), ("rejects", answer())])
def test_what_is_not_to_be_kept_is_not(redis: Redis, valkey_url: str, retain: str, evidence: Evidence) -> None:
    rules = declared(valkey_url, audit={"rate": 0.0})
    pool = ready(redis, rules)
    submit(redis, rules, [evidence])
    intent = orjson.loads(redis.get(intent_key(evidence.id)) or b"")
    redis.set(intent_key(evidence.id), orjson.dumps(intent | {"retain": retain}))
    pool.serve(burst=True)
    assert kept(redis, "case") == []
    with pytest.raises(NotFound):
        bundle(redis, evidence.id)
    stored = receipt_of(redis, evidence.id)
    assert stored is not None
    keys = {jws.kid_of(key): key for key in context.current().store.signer.published()}
    assert verify_receipt(stored.token, keys).hashes["replay"], "it is known what the verdict rests on"


def test_what_many_share_is_kept_once_and_again_when_it_is_lost(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = declared(valkey_url)
    pool = ready(redis, rules, ToyReference())
    ids = [answer(length=20) for _ in range(2)]
    for each in ids:
        audits.judged(pool, redis, rules, each)
    assert len(kept(redis, "part")) == 1
    assert len(kept(redis, "case")) == 2
    (part,) = kept(redis, "part")
    ttl = rules.verification.evidence_ttl
    assert ttl < redis.ttl(part) <= 2 * ttl
    assert all(0 < redis.ttl(key) <= ttl for key in kept(redis, "case"))
    redis.delete(part)
    monkeypatch.setattr("verifier_pool.parts.AGAIN_SECONDS", 0.0)
    audits.judged(pool, redis, rules, again := answer(length=20))
    assert examined(redis, again.id).outcome is Outcome.VERIFIED


def test_a_full_redis_costs_the_bundle_and_not_the_verdict(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = Settler.settle

    def full(*arguments: Any, **more: Any) -> bool:
        redis.config_set("maxmemory", 1)
        try:
            return settle(*arguments, **more)
        finally:
            redis.config_set("maxmemory", 0)

    monkeypatch.setattr(Settler, "settle", full)
    rules = declared(valkey_url, audit={"rate": 0.0})
    pool = ready(redis, rules)
    assert context.current().store.signer.published()  # what signs is there
    verification, _ = audits.judged(pool, redis, rules, evidence := answer())
    assert verification["verdict"] == "unaudited"
    with pytest.raises(NotFound):
        bundle(redis, evidence.id)


@pytest.mark.parametrize("first", [False, True], ids=["alone", "another came first"])
def test_a_case_comes_with_its_verdict_or_not_at_all(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Whoever is killed before that leaves none behind, and neither does who comes too late."""
    settle = Settler.settle

    def watched(settler: Settler, verification: Verification, *arguments: Any, **more: Any) -> bool:
        assert kept(redis, "case") == []
        if first:
            other = unverified(verification["id"], "job_failed", None, 1.0)
            assert settle(settler, other, None, NOTHING, 60, webhook=False)
        return settle(settler, verification, *arguments, **more)

    monkeypatch.setattr(Settler, "settle", watched)
    rules = declared(valkey_url, audit={"rate": 0.0})
    pool = ready(redis, rules)
    submit(redis, rules, [answer()])
    pool.serve(burst=True)
    assert len(kept(redis, "case")) == int(not first)
