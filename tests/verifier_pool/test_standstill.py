"""A worker that can do nothing right leaves the backlog to whoever can."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml
import zstandard
from redis import Redis
from redis.exceptions import OutOfMemoryError, ResponseError
from rq.job import Job
from rq.serializers import JSONSerializer

from policies import codec
from policies.errors import EvidenceError, OtherVersion, SettingsError
from tests.verifier_pool import rig
from tests.verifier_pool.toy import answer, settings
from verifier_pool import jobs, metrics, standstill
from verifier_pool import judge as judging
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import VERIFY_QUEUE, evidence_key, verdict_key
from verifier_pool.rq_job import RefusedJob
from verifier_pool.standstill import ALIKE, HOLD_SECONDS, SOON_SECONDS, Standstill
from verifier_pool.troubles import STILL, Troubles

TROUBLES = [ModuleNotFoundError("x"), ImportError("x"), OSError(28, "x"), SettingsError("key", "x")]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "ALIKE_SECONDS", 0.0)
    monkeypatch.setattr(standstill, "TROUBLE_SECONDS", (0.0,))


def queue(redis: Redis) -> FairQueue:
    return FairQueue(VERIFY_QUEUE, connection=redis)


def tries_left(redis: Redis, id: str) -> int | None:
    return Job.fetch(id, connection=redis, serializer=JSONSerializer).retries_left


def due_now(redis: Redis) -> None:
    """What was held comes now."""
    registry = queue(redis).scheduled_job_registry
    for id in registry.get_job_ids(cleanup=False):
        redis.zadd(registry.key, {id: 0})


def undecided(redis: Redis, ids: list[str]) -> bool:
    return redis.exists(*map(verdict_key, ids)) == 0


def work(redis: Redis, rules: Any, times: int = 8) -> None:
    for _ in range(times):
        rig.worker(redis, rules).serve(burst=True)
        due_now(redis)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda error: type(error).__name__)
def test_a_worker_without_a_part_of_itself_burns_no_backlog(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    rules = settings(valkey_url, audit={"rate": 0.0})
    ids = [rig.submit(redis, rules, [answer()]) for _ in range(5)]

    def broken(*_: object, **__: object) -> None:
        raise trouble

    with monkeypatch.context() as patched:
        patched.setattr(jobs, "on_grounds", broken)
        work(redis, rules)
        assert undecided(redis, ids)
        assert [tries_left(redis, id) for id in ids] == [3] * 5
        assert queue(redis).failed_job_registry.get_job_ids() == []
    work(redis, rules, 2)
    assert {rig.verdict_of(redis, id)["verdict"] for id in ids} == {"unaudited"}


@pytest.mark.usefixtures("at_once")
def test_a_release_that_fails_at_everything_burns_no_backlog(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = settings(valkey_url, audit={"rate": 0.0})
    ids = [rig.submit(redis, rules, [answer()]) for _ in range(6)]
    worker = rig.worker(redis, rules)

    def broken(*_: object, **__: object) -> None:
        raise AttributeError("no such thing")

    with monkeypatch.context() as patched:
        patched.setattr(jobs, "on_grounds", broken)
        for _ in range(8):
            worker.serve(burst=True)
            due_now(redis)
        assert undecided(redis, ids)
    worker.serve(burst=True)
    assert {rig.verdict_of(redis, id)["verdict"] for id in ids} == {"unaudited"}


@pytest.mark.usefixtures("at_once")
def test_answers_that_break_a_check_end_while_others_pass(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = settings(valkey_url, audit={"rate": 0.0})
    poisoned = [rig.submit(redis, rules, [answer()]) for _ in range(4)]
    judge: Callable[..., Any] = judging.on_grounds

    def broken(choices: Any, grounds: Any) -> Any:
        if choices[0].id in poisoned:
            raise ZeroDivisionError
        return judge(choices, grounds)

    monkeypatch.setattr(jobs, "on_grounds", broken)
    worker = rig.worker(redis, rules)
    for _ in range(20):
        good = rig.submit(redis, rules, [answer()])
        worker.serve(burst=True)
        assert rig.verdict_of(redis, good)["verdict"] == "unaudited"
        due_now(redis)
    assert {tuple(rig.verdict_of(redis, id)["reasons"]) for id in poisoned} == {("job_failed: ZeroDivisionError",)}


def of_another_version(kind: str) -> bytes:
    raw = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(codec.pack([answer()])))
    if kind == "version":
        raw["v"] = codec.VERSION + 1
    elif kind == "field":
        raw["choices"][0]["new"] = 1
    else:
        del raw["choices"][0]["text"]
    return zstandard.ZstdCompressor(write_content_size=True).compress(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize("kind", ["version", "field", "missing"])
def test_evidence_of_another_version_waits_for_whoever_reads_it(redis: Redis, valkey_url: str, kind: str) -> None:
    rules = settings(valkey_url, audit={"rate": 0.0})
    evidence = answer()
    id = rig.submit(redis, rules, [evidence], packed=of_another_version(kind))
    worker = rig.worker(redis, rules)
    for _ in range(8):
        good = rig.submit(redis, rules, [answer()])
        worker.serve(burst=True)
        assert rig.verdict_of(redis, good)["verdict"] == "unaudited"
        due_now(redis)
    assert undecided(redis, [id])
    assert tries_left(redis, id) == 3
    redis.set(evidence_key(id), codec.pack([evidence]), ex=600)
    worker.serve(burst=True)
    assert rig.verdict_of(redis, id)["verdict"] == "unaudited"


def test_what_is_held_ends_when_its_evidence_does(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url, audit={"rate": 0.0})
    id = rig.submit(redis, rules, [answer()], packed=of_another_version("field"))
    rig.worker(redis, rules).serve(burst=True)
    redis.delete(evidence_key(id))
    due_now(redis)
    rig.worker(redis, rules).serve(burst=True)
    assert rig.verdict_of(redis, id)["reasons"] == ["evidence_expired"]


@pytest.mark.parametrize("packed", [b"", b"poison", zstandard.compress(b"\xc1"), zstandard.compress(b"")])
def test_damage_is_no_other_version(packed: bytes) -> None:
    with pytest.raises(EvidenceError) as raised:
        codec.unpack(packed)
    assert not isinstance(raised.value, OtherVersion)


BROKEN = """
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name == "verifier_pool.judge":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Gone())
from verifier_pool import worker
worker.main(["--config", sys.argv[1], "--burst"])
"""


@pytest.mark.parametrize(
    ("program", "wrong", "code"),
    [
        (BROKEN, {}, 1),
        (None, {"nonsense": 1}, 3),
        (None, {"models": {"toy": {"profile": "/no/such/profile"}}}, 3),
        (None, {"models": {"toy": {"tokenizer": "/no/such/tokenizer"}}}, 3),
    ],
    ids=["module", "setting", "profile", "tokenizer"],
)
def test_a_worker_that_cannot_start_leaves_all_as_it_is(
    redis: Redis, valkey_url: str, tmp_path: Path, program: str | None, wrong: dict[str, Any], code: int
) -> None:
    rules = settings(valkey_url, audit={"rate": 0.0})
    ids = [rig.submit(redis, rules, [answer()]) for _ in range(3)]
    config = tmp_path / "countersign.yaml"
    config.write_text(yaml.safe_dump({"redis_url": valkey_url, "audit": {"rate": 0.0}} | wrong))
    ours = ["-m", "countersign", "worker", "--config", str(config), "--burst"]
    run = ["-c", program, str(config)] if program else ours
    found = subprocess.run([sys.executable, *run], capture_output=True, cwd=rig.ROOT, env=dict(os.environ))
    assert found.returncode == code, found.stderr
    assert undecided(redis, ids)
    assert set(queue(redis).get_job_ids()) == set(ids)
    work(redis, rules, 1)
    assert {rig.verdict_of(redis, id)["verdict"] for id in ids} == {"unaudited"}


def test_one_job_that_always_fails_is_its_own_fault() -> None:
    state = Standstill()
    assert [state.failed("a", ZeroDivisionError()) for _ in range(9)] == [0] * 9
    assert not state.wait


def test_many_that_fail_at_once_may_still_be_their_own_fault() -> None:
    state = Standstill()
    assert {state.failed(str(number), ZeroDivisionError()) for number in range(99)} == {0}


def test_nothing_is_taken_for_a_while_when_nothing_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "ALIKE_SECONDS", 0.0)
    state = Standstill()
    held = [state.failed(str(number), KeyError()) for number in range(ALIKE + 2)]
    assert held == [0] * (ALIKE - 1) + [HOLD_SECONDS] * 3
    assert 0 < state.wait <= 0.5
    assert shown() == 1
    state.succeeded()
    assert not state.wait
    assert shown() == 0
    assert state.failed("again", KeyError()) == 0


def shown() -> float:
    """What `/metrics` says."""
    (family,) = [each for each in metrics.METERS.read() if each.name == "countersign.worker.standstill"]
    value = family.points["verify", ""]
    assert isinstance(value, float)
    return value


def test_who_has_nothing_left_to_fail_at_does_not_stand_still_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have done it."""
    state = Standstill()
    assert shown() == 0
    assert state.failed("a", OSError(28, "x"))
    assert shown() == 1
    monkeypatch.setattr(metrics, "STANDS_SECONDS", 0.0)
    assert shown() == 0


def test_a_reference_at_which_nothing_succeeds_stands_still() -> None:
    told, troubles = metrics.Reference("toy", second=False), Troubles()
    failed, well = (SimpleNamespace(troubled=troubled, void=False) for troubled in (True, False))

    def stands(*flights: Any) -> float:
        troubles._not_before = 0.0
        troubles.note(flights)
        told.stands(still=troubles.still)
        (family,) = [each for each in metrics.METERS.read() if each.name == "countersign.worker.standstill"]
        value = family.points["replay", "toy"]
        assert isinstance(value, float)
        return value

    assert [stands(failed) for _ in range(STILL)] == [0.0] * (STILL - 1) + [1.0]
    assert stands(failed, well) == 0.0


@pytest.mark.parametrize(
    ("error", "held"),
    [
        (OutOfMemoryError("OOM command not allowed"), SOON_SECONDS),
        (ResponseError("WRONGTYPE Operation against a key"), 0),
        (OtherVersion("x"), HOLD_SECONDS),
        (EvidenceError("x"), 0),
        (RefusedJob("x"), 0),
        (MemoryError(), 0),
        *((error, HOLD_SECONDS) for error in TROUBLES),
    ],
)
def test_whose_fault_it_is(error: Exception, held: int) -> None:
    assert Standstill().failed("a", error) == held


def test_evidence_of_another_version_holds_up_nothing_else() -> None:
    state = Standstill()
    for number in range(9):
        state.failed(str(number), OtherVersion("x"))
    assert not state.wait
