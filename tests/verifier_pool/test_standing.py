from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import orjson
import pytest
from redis import Redis

from policies.settings import Settings
from policies.unit import declaration_name, declaration_of
from tests.verifier_pool.crashes import survives, together
from tests.verifier_pool.receiver import Receiver, listening, status
from tests.verifier_pool.told import CLEAN, REJECTED, events, outbox, push, record, settle, told
from tests.verifier_pool.toy import settings
from verifier_pool import worker
from verifier_pool.link.queue import (
    OUTBOX,
    PREFIX,
    STANDINGS,
    UNFOLDED,
    UNITS_DROPPED,
    event_key,
    seen_key,
    standing_key,
    units_key,
)
from verifier_pool.standing import Contended, Standings, audit_rate, forget
from verifier_pool.webhooks import verify_signature

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
WEBHOOK = {"url": "https://example.com/hook", "secret": SECRET}


def declared(url: str, runtime: str = "", **changes: object) -> Settings:
    backend = {"name": "honest", "url": "http://127.0.0.1:1", "model": "toy", "runtime": runtime}
    return settings(url, backends=[backend], **changes)


def test_a_unit_is_stored_with_its_verdict_once(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    unit = told(rules)
    assert settle(redis, unit)
    assert not settle(redis, unit)
    assert redis.lrange(units_key("honest"), 0, -1) == [msgspec.json.encode(unit)]
    assert redis.smembers(UNFOLDED) == {b"honest"}
    assert Standings(redis, rules).fold("honest", 60) == 1
    assert Standings(redis, rules).fold("honest", 60) == 0
    assert record(redis, rules).coverage.generations == 1
    assert record(redis, rules).n == 1
    assert not redis.exists(units_key("honest"), UNFOLDED)


def test_what_others_read_of_a_standing(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    push(redis, told(rules))
    Standings(redis, rules).fold_left(60)
    name = declaration_name(declaration_of(rules.backend("honest")))
    entry = orjson.loads(redis.hget(STANDINGS, f"honest:{name}") or b"")
    numbers = {"evidence_log10", "needed_log10", "suspicion_log10"}
    assert {key: value for key, value in entry.items() if key not in numbers} == {
        "state": "trial",
        "audit_rate": 1.0,
        "since": entry["since"],
        "backend": "honest",
        "declaration": name,
        "life": 1,
    }
    assert entry["evidence_log10"] < entry["needed_log10"]
    assert Standings(redis, rules).backends() == ["honest"]


def test_more_units_than_one_step_takes(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    push(redis, *(told(rules) for _ in range(600)))
    assert Standings(redis, rules).fold("honest", seconds=0) == 256
    assert redis.sismember(UNFOLDED, "honest")
    assert Standings(redis, rules).fold("honest", 60) == 344
    assert record(redis, rules).coverage.generations == 600
    assert not redis.sismember(UNFOLDED, "honest")


def test_the_same_question_counts_once_over_folds_and_declarations(redis: Redis, valkey_url: str) -> None:
    rules, other = declared(valkey_url), declared(valkey_url, "other")
    unit = told(rules)
    for again in (unit, told(rules, unit=unit.unit), told(other, unit=unit.unit)):
        push(redis, again)
        Standings(redis, rules).fold("honest", 60)
    assert (record(redis, rules).n, record(redis, rules).outside) == (1, {"repeated": 1})
    assert (record(redis, other).n, record(redis, other).outside) == (0, {"repeated": 1})
    assert 0 < redis.ttl(seen_key("honest", "u")) <= 30 * 86_400
    # In one step as well.
    redis.flushall()
    push(redis, unit, told(rules, unit=unit.unit), told(other, unit=unit.unit))
    Standings(redis, rules).fold("honest", 60)
    assert (record(redis, rules).n, record(redis, other).n) == (1, 0)


def test_the_memory_of_names_is_bounded(redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifier_pool.link.scripts.MOST_REMEMBERED", 3)
    rules = settings(valkey_url)
    redis.zadd(seen_key("honest", "u"), {"u:old": time.time() - 31 * 86_400})
    often = told(rules, outcomes=CLEAN | {"distance": (1.0, 0.5)})
    others = [told(rules) for _ in range(4)]
    for unit in (often, others[0], others[1], msgspec.structs.replace(often, id="x"), others[2], others[3]):
        push(redis, unit)
        Standings(redis, rules).fold("honest", 60)
        time.sleep(0.002)
    # What comes again is not forgotten, and units do not push prompts out.
    kept = [often, others[2], others[3]]
    assert redis.zrange(seen_key("honest", "u"), 0, -1) == [f"u:{unit.unit}".encode() for unit in kept]
    assert redis.zrange(seen_key("honest", "p"), 0, -1) == [f"pr:{often.prompt}".encode()]


def test_another_declaration_begins_another_record_and_the_first_resumes(redis: Redis, valkey_url: str) -> None:
    first, second = (declared(valkey_url, runtime, webhook=WEBHOOK) for runtime in ("", "other"))
    for rules in (first, second, first):
        push(redis, told(rules))
        Standings(redis, rules).fold("honest", 60)
    assert (record(redis, first).number, record(redis, first).n) == (1, 2)
    assert (record(redis, second).number, record(redis, second).n) == (2, 1)
    assert [event["type"] for event in events(redis)] == ["backend.redeclared"]


def test_an_accusation_is_told_once(redis: Redis, valkey_url: str, caplog: pytest.LogCaptureFixture) -> None:
    rules = settings(valkey_url, webhook=WEBHOOK)
    for _ in range(3):
        push(redis, *(told(rules, verdict="reject", outcomes=REJECTED) for _ in range(5)))
        Standings(redis, rules).fold("honest", 60)
    assert record(redis, rules).state == "quarantined"
    assert [event["type"] for event in events(redis)][-1] == "backend.quarantined"
    assert len([event for event in events(redis) if event["type"] == "backend.quarantined"]) == 1
    assert events(redis)[-1]["data"]["backend"] == "honest"
    assert "honest" in caplog.text
    assert all(0 < redis.ttl(event_key(name.removeprefix("event:"))) <= 7 * 86400 for name in outbox(redis))
    redis.delete(OUTBOX)
    push(redis, told(settings(valkey_url)))
    assert Standings(redis, settings(valkey_url)).fold("honest", 60) == 1
    assert not redis.exists(OUTBOX)


def test_the_webhook_hears_of_the_operators_own_backends_only(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url, webhook=WEBHOOK)
    for name in ("honest", "attack"):
        units = (told(rules, verdict="reject", outcomes=REJECTED) for _ in range(20))
        push(redis, *(msgspec.structs.replace(unit, backend=name) for unit in units), backend=name)
    Standings(redis, rules).fold_left(60)
    for name in ("honest", "attack"):
        (found,) = Standings(redis, rules).records(name).values()
        assert found.state == "quarantined"
    assert {event["data"]["backend"] for event in events(redis)} == {"honest"}
    assert len(outbox(redis)) == len(events(redis)) == len(redis.keys(PREFIX + "event:*"))


@pytest.mark.parametrize(
    "poison", [b"", b"{", b'{"id":"x"}', "outcome", "other backend"], ids=["empty", "torn", "short", "range", "other"]
)
def test_a_unit_that_cannot_be_counted_is_told_of_and_spoils_no_other(
    redis: Redis, valkey_url: str, poison: bytes | str, caplog: pytest.LogCaptureFixture
) -> None:
    rules = settings(valkey_url)
    bad = {"outcome": told(rules, outcomes=CLEAN | {"selection": (7.0, 0.0)}), "other backend": told(rules)}
    bad["other backend"] = msgspec.structs.replace(bad["other backend"], backend="another")
    push(redis, told(rules), bad[poison] if isinstance(poison, str) else poison, told(rules), told(rules))
    assert Standings(redis, rules).fold("honest", 60) == 4
    assert record(redis, rules).coverage.generations == 3
    assert redis.hgetall(UNITS_DROPPED) == {b"honest": b"1"}
    assert "1 units of backend honest" in caplog.text


def test_a_full_list_drops_and_counts(redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifier_pool.link.scripts.MOST_UNITS", 2)
    rules = settings(valkey_url)
    assert all(settle(redis, told(rules)) for _ in range(5))
    assert redis.llen(units_key("honest")) == 2
    assert redis.hgetall(UNITS_DROPPED) == {b"honest": b"3"}


def test_a_record_that_cannot_be_read_is_never_replaced(
    redis: Redis, valkey_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    rules = settings(valkey_url)
    name = declaration_name(declaration_of(rules.backend("honest")))
    redis.hset(standing_key("honest"), name, b"junk")
    redis.hset(standing_key("honest"), "version", 4)
    push(redis, told(rules))
    push(redis, told(rules, backend="honest"), backend="fine")
    with pytest.raises(ValueError, match=r"."):
        Standings(redis, rules).fold("honest", 60)
    Standings(redis, rules).fold_left(60)
    assert redis.hgetall(standing_key("honest")) == {name.encode(): b"junk", b"version": b"4"}
    assert redis.llen(units_key("honest")) == 1
    assert "honest cannot be kept" in caplog.text
    assert not redis.exists(units_key("fine"))


def test_the_operator_decides(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url, webhook=WEBHOOK)
    here = Standings(redis, rules)
    assert here.override("honest", "quarantine", by="ann", why="a rumour").state == "quarantined"
    assert record(redis, rules).trail[-1].by == "ann"
    with pytest.raises(ValueError, match="already"):
        here.override("honest", "quarantine", by="ann", why="again")
    assert here.override("honest", "release", by="ann", why="untrue").state == "trial"
    assert [event["type"] for event in events(redis)] == ["backend.quarantined", "backend.recovered"]
    with pytest.raises(KeyError):
        here.override("nobody", "quarantine", by="ann", why="x")
    with pytest.raises(ValueError, match="why"):
        here.override("honest", "quarantine", by="ann", why=" ")


def test_a_pardon_leaves_behind_what_waits_and_takes_the_next_life(redis: Redis, valkey_url: str) -> None:
    rules, other = declared(valkey_url), declared(valkey_url, "other")
    push(redis, told(other), *(told(rules, verdict="reject", outcomes=REJECTED) for _ in range(300)))
    after = Standings(redis, rules).override("honest", "pardon", by="ann", why="a bug of ours")
    assert (after.state, after.number, after.n) == ("trial", 3, 0)
    assert record(redis, other).number == 1
    assert not redis.exists(units_key("honest"))
    assert after == record(redis, rules)


def test_a_declaration_that_was_left_is_audited_in_full_once_it_returns(redis: Redis, valkey_url: str) -> None:
    first, second = declared(valkey_url), declared(valkey_url, "other")
    push(redis, *(told(first, at=time.time() - 60) for _ in range(1000)))
    Standings(redis, first).fold("honest", 60)
    declaration = declaration_of(first.backend("honest"))
    assert audit_rate(redis, first.audit, "honest", declaration) == pytest.approx(0.1)
    push(redis, told(second))
    Standings(redis, second).fold("honest", 60)
    assert audit_rate(redis, first.audit, "honest", declaration) == 1.0
    push(redis, *(told(first, at=time.time() + 1) for _ in range(200)))
    Standings(redis, first).fold("honest", 60)
    assert audit_rate(redis, first.audit, "honest", declaration) == pytest.approx(0.5)


def test_who_always_comes_second_says_so(redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = settings(valkey_url)
    push(redis, told(rules))
    here = Standings(redis, rules)
    read = here._read

    def overtaken(backend: str) -> Any:
        found = read(backend)
        redis.hincrby(standing_key(backend), "version", 1)
        return found

    monkeypatch.setattr(here, "_read", overtaken)
    assert here.fold("honest", 60) == 0
    with pytest.raises(Contended):
        here.override("honest", "quarantine", by="ann", why="x")
    assert record(redis, rules) is None
    assert redis.llen(units_key("honest")) == 1


def test_the_audit_rate_follows_the_standing(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    declaration = declaration_of(rules.backend("honest"))

    def rate(**audits: object) -> float:
        return audit_rate(redis, settings(valkey_url, audit=audits).audit, "honest", declaration)

    assert rate() == 1.0
    assert rate(rate=0.25) == 0.25
    push(redis, *(told(rules) for _ in range(200)))
    Standings(redis, rules).fold("honest", 60)
    assert rate() == pytest.approx(0.5)
    assert rate(floor=0.75) == 0.75
    # Declared anew it is new.
    assert audit_rate(redis, rules.audit, "honest", declaration | {"runtime": "other"}) == 1.0
    name = declaration_name(declaration)
    for junk in (b"", b"[]", b"{", b'{"audit_rate":null}', b'{"audit_rate":{}}'):
        redis.hset(STANDINGS, f"honest:{name}", junk)
        assert rate() == 1.0


def test_many_processes_fold_at_once(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url, webhook=WEBHOOK)
    bad, good = declared(valkey_url, "other", webhook=WEBHOOK), rules
    units = [told(bad if number % 2 else good) for number in range(1500)]
    push(redis, *units[:500])

    def work() -> None:
        mine = Redis.from_url(valkey_url)
        here = Standings(mine, rules)
        for unit in units[500:]:
            if settle(mine, unit):
                here.fold("honest", 60)
        here.fold("honest", seconds=100)

    together(work, work, work)
    Standings(redis, rules).fold_left(60)
    assert record(redis, good).coverage.generations == record(redis, bad).coverage.generations == 750
    assert record(redis, good).n == record(redis, bad).n == 750
    assert redis.llen(units_key("honest")) == 0
    assert [event["type"] for event in events(redis)].count("backend.redeclared") == 1


def test_a_fold_killed_anywhere_counts_nothing_twice_and_loses_nothing(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url, webhook=WEBHOOK)

    def work() -> None:
        Standings(Redis.from_url(valkey_url), rules).fold("honest", 60)

    command, ended, lefts = 0, False, set[int]()
    while not ended:
        redis.flushall()
        push(redis, *(told(rules, verdict="reject", outcomes=REJECTED) for _ in range(300)))
        ended = survives(work, command)
        lefts.add(int(redis.llen(units_key("honest"))))
        Standings(redis, rules).fold_left(60)
        assert record(redis, rules).coverage.generations == 300
        assert redis.zcard(seen_key("honest", "u")) == record(redis, rules).n
        assert redis.zcard(seen_key("honest", "p")) == 300
        assert [event["type"] for event in events(redis)].count("backend.quarantined") == 1
        assert not redis.exists(UNFOLDED, units_key("honest"))
        command += 1
    assert lefts == {300, 44, 0}


def test_an_event_reaches_the_receiver(redis: Redis, valkey_url: str) -> None:
    with listening(Receiver(status(500), status(200))) as receiver:
        hook = {"url": receiver.url, "secret": SECRET, "allow_private": True, "retries": [0, 0]}
        rules = settings(valkey_url, webhook=hook)
        Standings(redis, rules).override("honest", "quarantine", by="ann", why="a rumour")
        worker.run_webhooks(rules, threading.Event(), burst=True)
    (first, second) = receiver.requests
    assert first[1] == second[1]
    assert first[0]["webhook-id"] == second[0]["webhook-id"]
    assert verify_signature(SECRET, second[0], second[1], time.time())
    assert orjson.loads(second[1])["type"] == "backend.quarantined"
    assert not redis.exists(OUTBOX)


def test_what_was_made_for_a_test_leaves_nothing(redis: Redis, valkey_url: str) -> None:
    rules = declared(valkey_url)
    push(redis, told(rules, outcomes=REJECTED))
    Standings(redis, rules).fold("honest", 60)
    assert Standings(redis, rules).backends() == ["honest"]
    forget(redis, "honest")
    assert redis.keys("*honest*") == []
    assert Standings(redis, rules).backends() == []
    forget(redis, "honest")
