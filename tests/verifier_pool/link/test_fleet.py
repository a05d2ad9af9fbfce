"""What Redis holds, as metrics: exact, and asked for cheaply."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import orjson
import pytest
from redis import Redis
from rq.job import Job

from policies.checks import VerdictWord
from policies.settings import Settings
from policies.unit import Unit, declaration_of
from tests.support.valkey import Valkey
from tests.verifier_pool import rig
from tests.verifier_pool.toy import answer, settings
from verifier_pool.link import fair, fleet
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.fleet import Fleet
from verifier_pool.link.meters import Family, Point
from verifier_pool.link.queue import (
    CANARIES,
    OUTBOX,
    STANDINGS,
    UNITS_DROPPED,
    VERIFY_JOB,
    VERIFY_QUEUE,
    queue_of,
    standing_field,
    tally_key,
    units_key,
)
from verifier_pool.standing import Standings
from verifier_pool.store import Store

WEBHOOK = {"url": "https://hooks.example.com", "secret": "whsec_AAAA"}
REFERENCE = {"kind": "vllm_http", "url": "http://127.0.0.1:9"}


@pytest.fixture
def rules(valkey_url: str) -> Settings:
    tree = settings(valkey_url).model_dump(exclude_unset=True)
    tree["models"]["toy"] |= {"reference": REFERENCE, "second_reference": REFERENCE, "second_profile": "unread"}
    return Settings.model_validate(tree | {"webhook": WEBHOOK})


@pytest.fixture
def known(valkey_url: str, rules: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(fleet, "FRESH_SECONDS", 0.0)
    found = Fleet(valkey_url, rules)
    yield found
    found.close()


def points(known: Fleet, name: str) -> dict[Any, Point]:
    (family,) = [each for each in known.read() if each.name == name]
    return {values[0] if len(values) == 1 else values: point for values, point in family.points.items()}


def decided(redis: Redis, rules: Settings, id: str, word: str, **more: Any) -> bool:
    document = {"id": id, "backend": "honest", "model": "toy", "verdict": word, "decided": time.time()}
    document |= {"reasons": [], "checks": []}
    return Store(redis, verdict_ttl=600).settle(document | more, None)


def push(redis: Redis, rules: Settings, queue: str, id: str) -> None:
    given = fair.options(id, rules.verification, inline=False, tenant="t", tokens=5, size=0)
    FairQueue(queue, redis).enqueue(VERIFY_JOB, id, **given)


def test_a_verdict_counts_once(redis: Redis, rules: Settings, known: Fleet) -> None:
    assert points(known, "countersign.verdicts") == {("honest", "toy", str(word)): 0 for word in VerdictWord}
    check = {"name": "distance", "result": "reject", "reason": "too_far: 3"}
    told = {"audited": True, "reasons": ["too_far: 3"], "checks": [check]}
    assert decided(redis, rules, "a" * 32, "reject", **told)
    assert not decided(redis, rules, "a" * 32, "reject", **told)
    assert not decided(redis, rules, "a" * 32, "pass")
    assert decided(redis, rules, "b" * 32, "unverified", reasons=["backlog"])
    found = points(known, "countersign.verdicts")
    assert {key[2]: count for key, count in found.items() if count} == {"reject": 1, "unverified": 1}
    assert points(known, "countersign.audited") == {("honest", "toy"): 1}
    assert points(known, "countersign.checks") == {("honest", "toy", "distance", "reject", "too_far"): 1}
    assert points(known, "countersign.verdict.reasons") == {
        ("honest", "toy", "reject", "too_far"): 1,
        ("honest", "toy", "unverified", "backlog"): 1,
    }
    assert 0 < redis.ttl(tally_key("honest")) <= 30 * 86_400


def test_there_are_no_more_counters_than_are_allowed(redis: Redis, rules: Settings) -> None:
    for number in range(40):
        codes = [f"odd_{number}_{each}: x" for each in range(50)]
        decided(redis, rules, f"{number:032x}", "inconclusive", reasons=codes)
    assert redis.hlen(tally_key("honest")) == 1000
    assert redis.hget(tally_key("honest"), "verdict|inconclusive") == b"40"


def test_queues_are_told_by_state_and_age(redis: Redis, rules: Settings, known: Fleet) -> None:
    assert set(points(known, "countersign.queue.oldest").values()) == {0.0}
    push(redis, rules, VERIFY_QUEUE, "a" * 32)
    push(redis, rules, VERIFY_QUEUE, "b" * 32)
    push(redis, rules, queue_of("toy", second=True), "c" * 32)
    queue = FairQueue(VERIFY_QUEUE, redis)
    redis.zadd(queue.since_key, {"b" * 32: time.time() - 100})
    jobs = points(known, "countersign.queue.jobs")
    assert jobs["verify", "", "waiting"] == 2
    assert jobs["second-replay", "toy", "waiting"] == 1
    assert jobs["replay", "toy", "waiting"] == jobs["webhooks", "", "dead"] == 0
    assert 100 <= points(known, "countersign.queue.oldest")["verify", ""] < 160  # type: ignore[operator]
    assert len(queue.take(1)) == 1
    jobs = points(known, "countersign.queue.jobs")
    assert (jobs["verify", "", "waiting"], jobs["verify", "", "running"]) == (1, 1)


def test_what_is_gone_spoils_no_age(redis: Redis, rules: Settings, known: Fleet) -> None:
    queue, now = FairQueue(VERIFY_QUEUE, redis), time.time()
    redis.zadd(queue.since_key, {f"gone-{number}": now - 1000 for number in range(50)})
    push(redis, rules, VERIFY_QUEUE, "a" * 32)
    assert 0 <= points(known, "countersign.queue.oldest")["verify", ""] < 60  # type: ignore[operator]
    assert redis.zrange(queue.since_key, 0, -1) == [b"a" * 32]


def test_what_rq_pushes_back_has_an_age_too(redis: Redis, rules: Settings, known: Fleet) -> None:
    push(redis, rules, VERIFY_QUEUE, "a" * 32)
    queue = FairQueue(VERIFY_QUEUE, redis)
    (id,) = queue.take(1)
    redis.hset(Job.key_for(id), "enqueued_at", "2020-01-01T00:00:00.000000Z")
    queue.push_job_id(id, at_front=True)
    assert points(known, "countersign.queue.oldest")["verify", ""] > 86_400  # type: ignore[operator]
    redis.hset(Job.key_for(id), "enqueued_at", b"\xff odd")
    assert points(known, "countersign.queue.oldest")["verify", ""] == 0


def test_what_waits_for_its_verdict_has_an_age(redis: Redis, rules: Settings, known: Fleet) -> None:
    rig.submit(redis, rules, [answer((40, 41), 4)])
    assert 0 <= points(known, "countersign.backlog.oldest")["honest", "toy"] < 60  # type: ignore[operator]
    assert points(known, "countersign.undecided") == {(): 1}
    redis.zadd(OUTBOX, {"a" * 32: time.time() - 50})
    assert points(known, "countersign.webhook.outbox") == {(): 1}
    assert 50 <= points(known, "countersign.webhook.outbox.oldest")[()] < 110  # type: ignore[operator]


def test_workers_count_while_they_live(redis: Redis, rules: Settings, known: Fleet) -> None:
    pool = rig.worker(redis, rules)
    with pool.loop._present():
        assert points(known, "countersign.queue.workers")["verify", ""] == 1
        # One that was killed: still in the set of its queue, and its own record is over.
        redis.delete(pool.loop.key)
        assert points(known, "countersign.queue.workers")["verify", ""] == 0


def test_standings_are_told_as_they_are(redis: Redis, rules: Settings, known: Fleet) -> None:
    assert points(known, "countersign.backend.evidence_log10") == {}
    field = known._fields[0]
    entry = {"evidence_log10": 2.5, "needed_log10": 6.0, "suspicion_log10": None}
    redis.hset(STANDINGS, field, orjson.dumps(entry))
    redis.hset(STANDINGS, standing_field("honest", "another"), orjson.dumps({"evidence_log10": 1}))
    assert points(known, "countersign.backend.evidence_log10") == {("honest", "toy"): 2.5}
    assert points(known, "countersign.backend.evidence_needed_log10") == {("honest", "toy"): 6.0}
    assert points(known, "countersign.backend.suspicion_log10") == {}
    for odd in (b"\xff", b"[]", b"7"):
        redis.hset(STANDINGS, field, odd)
        assert points(known, "countersign.backend.evidence_log10") == {}


def test_tokens_go_up_whatever_becomes_of_the_record(redis: Redis, rules: Settings, known: Fleet) -> None:
    """Under another declaration, and in another life, a record begins at none: a counter that did would tell of tokens
    that nobody served."""

    def counted() -> tuple[Point, ...]:
        found = (points(known, f"countersign.backend.tokens.{which}") for which in ("served", "decided"))
        return tuple(each["honest", "toy"] for each in found)

    def serve(number: int, now: Settings, tokens: int, undecided: str = "") -> None:
        declaration = declaration_of(now.backend("honest"))
        unit = Unit(
            id=f"{number:032x}",
            at=time.time(),
            served=time.time(),
            backend="honest",
            declaration=declaration,
            key="k",
            unit=f"{number:016x}",
            prompt=f"{number:016x}",
            tokens=tokens,
            verdict="inconclusive" if undecided else "pass",
            undecided=undecided,
            blame="request" if undecided else "",
            outcomes={"selection": (0.0, 0.0)},
        )
        redis.rpush(units_key("honest"), msgspec.json.encode(unit))
        assert Standings(redis, now).fold("honest") == 1

    assert counted() == (0, 0)
    serve(1, rules, 100)
    assert counted() == (100, 100)
    serve(2, rules, 50, "too_short")
    assert counted() == (150, 100)
    tree = rules.model_dump(exclude_unset=True)
    tree["backends"] = [tree["backends"][0] | {"precision": "fp8"}]
    other = Settings.model_validate(tree)
    known.renew(other)
    assert counted() == (150, 100)
    serve(3, other, 7)
    assert counted() == (157, 107)
    Standings(redis, other).override("honest", "pardon", by="me", why="a test")
    assert counted() == (157, 107)
    serve(4, other, 3)
    assert counted() == (160, 110)
    known.renew(rules)
    serve(5, rules, 40)
    assert counted() == (200, 150)


def test_canaries_and_lost_units_are_counted(redis: Redis, rules: Settings, known: Fleet) -> None:
    redis.hset(CANARIES, mapping={"toy:passed": 3, "toy:second:failed": 2, "gone:passed": 9})
    redis.hset(UNITS_DROPPED, mapping={"honest": 4, "gone": 5})
    found = points(known, "countersign.canaries")
    assert {key: count for key, count in found.items() if count} == {
        ("toy", "first", "passed"): 3,
        ("toy", "second", "failed"): 2,
    }
    assert points(known, "countersign.standing.units.dropped") == {("honest", "toy"): 4}


def test_other_settings_are_taken_over(redis: Redis, rules: Settings, known: Fleet) -> None:
    push(redis, rules, VERIFY_QUEUE, "a" * 32)
    tree = rules.model_dump(exclude_unset=True)
    tree["backends"] = [tree["backends"][0] | {"name": "new"}]
    known.renew(Settings.model_validate(tree))
    assert set(points(known, "countersign.audited")) == {("new", "toy")}


ALLOWED = {"llen", "zcard", "lindex", "zrange", "zrangebyscore", "smembers", "hget", "hmget", "hgetall", "exists"}
ALLOWED |= {"eval", "get", "zscore"}  # `FairQueue.ask_oldest`
CONNECTING = {"hello", "client|setinfo", "client|maint_notifications", "client|setname", "select", "commandstats"}


def test_nothing_that_grows_with_the_traffic_is_asked(redis: Redis, rules: Settings, known: Fleet) -> None:
    """Nor more of it, however much there is: two round trips, of commands that look at ends and sizes."""

    def asked() -> dict[str, int]:
        redis.config_resetstat()
        known.read()
        stats: dict[str, Any] = redis.info("commandstats")
        return {name.removeprefix("cmdstat_"): int(each["calls"]) for name, each in stats.items()}

    push(redis, rules, VERIFY_QUEUE, "f" * 32)
    known.read()
    few = asked()
    for number in range(500):
        push(redis, rules, VERIFY_QUEUE, f"{number:032x}")
        decided(redis, rules, f"{number + 10_000:032x}", "pass")
    many = asked()
    ours = {name for name in many if name.partition("|")[0] not in {"config", "info", *CONNECTING}}
    assert ours <= ALLOWED
    assert {name: many[name] for name in ours} == {name: few[name] for name in ours}


def test_several_readers_ask_as_often_as_one(
    redis: Redis, valkey_url: str, rules: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "FRESH_SECONDS", 60.0)
    known = Fleet(valkey_url, rules)
    before = known.read()
    decided(redis, rules, "a" * 32, "pass")
    assert known.read() == before
    known.close()


def test_a_store_that_is_away_costs_the_answer_and_no_more(rules: Settings) -> None:
    with Valkey() as valkey:
        known = Fleet(valkey.url, rules)
        assert known.read()
        known.renew(rules)
        valkey.kill()
        found: list[Family] = known.read()
        assert found == []
        known.close()


def test_other_settings_never_wait_for_who_reads(rules: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken over on the event loop, while a thread may wait for a Redis that is slow."""
    with Valkey() as valkey:
        known = Fleet(valkey.url, rules)
        reading, taken = threading.Event(), threading.Event()
        of_queues = known._of_queues

        def slow() -> Iterator[Family]:
            reading.set()
            assert taken.wait(60)
            return of_queues()

        monkeypatch.setattr(known, "_of_queues", slow)
        reader = threading.Thread(target=known.read)
        reader.start()
        assert reading.wait(60)
        known.renew(rules.model_copy(update={"models": {}, "backends": ()}))
        taken.set()
        reader.join()
        monkeypatch.undo()
        labels = {labels for each in known.read() for labels in each.points if "backend" in each.labels}
        assert labels == set()
        known.close()
