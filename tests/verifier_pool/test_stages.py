from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from redis import Redis
from rq.job import Job
from rq.serializers import JSONSerializer

from policies.settings import Settings
from tests.verifier_pool import rig
from tests.verifier_pool.toy import ToyReference, answer, settings
from verifier_pool import context, jobs, packing
from verifier_pool.link.fair import LANES
from verifier_pool.link.queue import intent_key, waiting_bytes_key
from verifier_pool.replays import outcome_key, replay_job, request_key
from verifier_pool.stages import jobs_of


def held(redis: Redis, id: str) -> dict[str, Any]:
    return Job.fetch(id, connection=redis, serializer=JSONSerializer).meta


@pytest.fixture
def asked(redis: Redis, valkey_url: str) -> tuple[Settings, str, rig.Pool]:
    """An answer that somebody waits for, up to its replay."""
    rules = settings(valkey_url)
    id = rig.submit(redis, rules, [answer()])
    intent = orjson.loads(redis.get(intent_key(id)) or b"")
    redis.set(intent_key(id), orjson.dumps(intent | {"mode": "inline", "owner": "somebody"}))
    pool = rig.worker(redis, rules, {"toy": ToyReference()})
    pool.loop.serve(burst=True)
    return rules, id, pool


def test_every_stage_keeps_the_lane_and_the_tenant(redis: Redis, asked: tuple[Settings, str, rig.Pool]) -> None:
    _, id, pool = asked
    meta = held(redis, replay_job(id))
    assert (LANES[meta["lane"] - 1], meta["tenant"], meta["tokens"]) == ("inline", "somebody", 15)
    pool.replaying[0].serve(burst=True)
    meta = held(redis, id + "-j")
    assert (LANES[meta["lane"] - 1], meta["tenant"], meta["tokens"]) == ("inline-judge", "somebody", 15)


def test_a_pass_while_the_replay_waits_asks_for_nothing_more(
    redis: Redis, asked: tuple[Settings, str, rig.Pool]
) -> None:
    _, id, pool = asked
    before = redis.get(request_key(id))
    redis.hset(Job.key_for(replay_job(id)), "mark", "kept")
    assert jobs.verify(id) == jobs.ASKED
    assert redis.hget(Job.key_for(replay_job(id)), "mark") == b"kept"
    assert redis.get(request_key(id)) == before
    assert pool.serve(burst=True) == 2


def test_a_replay_whose_job_was_lost_is_asked_for_again(redis: Redis, asked: tuple[Settings, str, rig.Pool]) -> None:
    _, id, pool = asked
    redis.delete(Job.key_for(replay_job(id)))
    assert jobs.verify(id) == jobs.ASKED
    pool.serve(burst=True)
    assert rig.verdict_of(redis, id)["audited"] is True


def test_the_first_outcome_is_the_outcome(redis: Redis, asked: tuple[Settings, str, rig.Pool]) -> None:
    _, id, pool = asked
    context.current().stages.give_up(id, "reference_backlog", second=False)
    before = redis.get(outcome_key(id))
    context.current().stages.give_up(id, "replay_failed", second=False)
    assert redis.get(outcome_key(id)) == before
    pool.serve(burst=True)
    assert "reference_backlog" in rig.verdict_of(redis, id)["reasons"]


def test_what_waits_with_a_generation_is_counted(redis: Redis, asked: tuple[Settings, str, rig.Pool]) -> None:
    _, id, pool = asked
    size = len(redis.get(request_key(id)) or b"")
    assert int(redis.get(waiting_bytes_key("honest")) or 0) == size > 0
    pool.replaying[0].serve(burst=True)
    assert int(redis.get(waiting_bytes_key("honest")) or 0) == len(redis.get(outcome_key(id)) or b"")
    pool.serve(burst=True)
    assert int(redis.get(waiting_bytes_key("honest")) or 0) == 0


def test_nothing_is_left_but_what_has_to_stay(redis: Redis, asked: tuple[Settings, str, rig.Pool]) -> None:
    _, id, pool = asked
    pool.serve(burst=True)
    found = cast("list[bytes]", redis.keys(f"*{id}*"))
    # The hash in the name of a case is of what lies in it.
    left = {re.sub(r"(:case:ID):.*", r"\1", key.decode().replace(id, "ID")) for key in found}
    names = ("intent", "evidence", "case", "verdict", "receipt", "audited")
    assert left <= {f"{{countersign}}:{name}:ID" for name in names} | {
        "{countersign}:rq:job:ID",
        "{countersign}:rq:results:ID",
    }
    assert all(redis.ttl(key) > 0 or b"intent" in key for key in found)


def test_a_request_that_is_too_large_is_too_long(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(packing, "MAX_UNPACKED", 200)
    rules, reference = settings(valkey_url), ToyReference()
    id = rig.submit(redis, rules, [answer()])
    rig.worker(redis, rules, {"toy": reference}).serve(burst=True)
    assert "too_long" in rig.verdict_of(redis, id)["reasons"]
    assert reference.seen == []


def test_ids_of_jobs() -> None:
    assert jobs_of("x") == ["x", "x-r", "x-j", "x-v", "x-r2", "x-j2", "x-v2"]
