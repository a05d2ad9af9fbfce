"""What the proxy's recorder writes about backends, as the workers read it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from redis import Redis

from policies import codec
from policies.settings import BackendSettings, Settings
from policies.unit import Unit, declaration_of
from proxy.generation import Generation
from proxy.metrics import Metrics
from proxy.outage import Outage
from proxy.recorder import Recorder
from tests.verifier_pool import rig
from tests.verifier_pool.toy import answer, settings
from verifier_pool.link.queue import intent_key, units_key, waiting_key
from verifier_pool.link.scripts import note_waiting
from verifier_pool.standing import Standings
from verifier_pool.store import Store
from verifier_pool.sweeper import sweep

BACKEND = BackendSettings.model_validate(
    {"name": "honest", "url": "http://127.0.0.1:1", "model": "toy", "runtime": "r", "engine": "e", "precision": "bf16"}
    | {"speculative": True}
)


def rules(url: str, **changes: object) -> Settings:
    return settings(url, backends=[BACKEND.model_dump()], **changes)


def generation(id: str) -> Generation:
    found = Generation(id=id, owner="o", endpoint="chat", model="toy", mode="async", stream=False, backend="honest")
    found.declaration = declaration_of(BACKEND)
    return found


@pytest.fixture
def recorder(valkey_url: str) -> Iterator[Recorder]:
    made = Recorder(valkey_url, rules(valkey_url, verification={"max_backlog": 2}), Outage(), Metrics())
    made.start()
    yield made
    made.stop()


def units(redis: Redis, count: int) -> list[Unit]:
    rig.wait_until(lambda: redis.llen(units_key("honest")) == count)
    return [msgspec.json.decode(data, type=Unit) for data in redis.lrange(units_key("honest"), 0, -1)]


def test_what_it_decides_itself_counts_for_the_backend_as_declared(
    redis: Redis, valkey_url: str, recorder: Recorder
) -> None:
    recorder.unchecked(generation("a" * 32), "no_answer")
    recorder.unchecked(generation("a" * 32), "client_left")
    (found,) = units(redis, 1)
    assert found.declaration == declaration_of(BACKEND)
    assert (found.id, found.verdict, found.undecided, found.blame) == ("a" * 32, "unverified", "no_answer", "backend")
    Standings(redis, rules(valkey_url)).fold_left()
    (record,) = Standings(redis, rules(valkey_url)).records("honest").values()
    assert record.coverage.generations == 1


def test_what_is_shed_counts_with_its_tokens(redis: Redis, recorder: Recorder) -> None:
    for number in range(4):
        note_waiting(redis, f"{number:032x}", "honest", time.time(), 600)
    evidence = answer(length=7)
    recorder.finished(generation(evidence.id), lambda: [evidence, replace(evidence, index=1)], 1)
    (found,) = units(redis, 1)
    assert (found.undecided, found.blame, found.tokens) == ("backlog", "ours", 14)


def test_a_backends_queue_is_as_long_as_what_waits_for_a_verdict(
    redis: Redis, valkey_url: str, recorder: Recorder
) -> None:
    evidence = answer()
    recorder.finished(generation(evidence.id), lambda: [evidence], 1)
    rig.wait_until(lambda: redis.zrange(waiting_key("honest"), 0, -1) == [evidence.id.encode()])
    assert 0 < redis.ttl(waiting_key("honest")) <= 3600
    # Who was forgotten for longer than evidence lasts is dropped with the next.
    redis.zadd(waiting_key("honest"), {"lost": time.time() - 4000})
    other = answer()
    recorder.finished(generation(other.id), lambda: [other], 1)
    rig.wait_until(lambda: redis.zscore(waiting_key("honest"), other.id))
    assert set(redis.zrange(waiting_key("honest"), 0, -1)) == {evidence.id.encode(), other.id.encode()}
    rig.worker(redis, rules(valkey_url)).serve(burst=True)
    assert redis.zcard(waiting_key("honest")) == 0


def test_a_lost_generation_is_counted_from_its_intent(redis: Redis, valkey_url: str) -> None:
    known = generation("a" * 32)
    rig.intent(redis, known.id, time.time() - 1)
    redis.set(intent_key(known.id), msgspec.json.encode(known.intent()))
    sweep(Store(redis, verdict_ttl=600), rules(valkey_url).verification)
    (found,) = units(redis, 1)
    assert (found.declaration, found.undecided) == (declaration_of(BACKEND), "proxy_lost")


def test_evidence_and_settings_spell_a_declaration_alike() -> None:
    evidence = answer(runtime="r", engine="e", precision="bf16", speculative=True)
    (again,) = codec.unpack(codec.pack([evidence]))
    assert declaration_of(again) == declaration_of(BACKEND)
