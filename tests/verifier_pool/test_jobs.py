from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import zstandard
from redis import Redis
from rq.job import Job
from rq.serializers import JSONSerializer

from policies import codec
from policies.evidence import Sampling
from policies.verification import unverified
from tests.verifier_pool import rig
from tests.verifier_pool.toy import ToyReference, answer, failing, settings
from verifier_pool import context, jobs, replay_endings, troubles
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import OPEN, VERIFY_JOB, VERIFY_QUEUE, evidence_key


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_endings, "RETRY_SECONDS", (0, 0, 0))
    monkeypatch.setattr(troubles, "TROUBLE_SECONDS", (0.01,))


def queue(redis: Redis) -> FairQueue:
    return FairQueue(VERIFY_QUEUE, connection=redis)


def test_recorded_evidence_becomes_a_verdict(redis: Redis, valkey_url: str) -> None:
    rules, reference = settings(valkey_url), ToyReference()
    id = rig.submit(redis, rules, [answer()])
    # First pass, replay, and the pass after it.
    assert rig.worker(redis, rules, {"toy": reference}).serve(burst=True) == 3
    verification = rig.verdict_of(redis, id)
    assert verification["audited"] is True
    assert [check["name"] for check in verification["checks"]] == ["structure", "selection", "distance", "margin"]
    assert verification["owner"] == "0" * 64
    assert redis.zcard(OPEN) == 0
    assert reference.batches == [1]


CANARY = "CANARY-of-a-prompt"


def spilling(_requests: object) -> None:
    raise RuntimeError(f"cannot replay {CANARY}")


@pytest.mark.parametrize("trouble", [None, failing("timeout"), failing("refused"), spilling])
@pytest.mark.parametrize("damaged", [False, True])
def test_logs_hold_nothing_of_what_was_said(
    redis: Redis,
    valkey_url: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    trouble: Callable[..., None] | None,
    damaged: bool,
) -> None:
    rules = settings(valkey_url)
    sampling = Sampling(temperature=0.0, seed=1, max_tokens=20, stop=(CANARY,), bad_words=(CANARY,))
    evidence = answer(request=f'{{"messages":["{CANARY}"]}}'.encode(), text=CANARY, sampling=sampling)
    packed = zstandard.compress(CANARY.encode()) if damaged else None
    loop = rig.worker(redis, rules, {"toy": ToyReference(trouble)})
    # As the worker sets them.
    for name in ("rq.worker", "rq.job"):
        caplog.set_level("WARNING", name)
    caplog.set_level("DEBUG")
    id = rig.submit(redis, rules, [evidence], packed)
    loop.serve(burst=True)
    shown = capfd.readouterr()
    assert CANARY not in caplog.text + shown.out + shown.err
    assert CANARY not in str(context.current().store.verdict(id))


def test_without_a_reference_only_the_cpu_checks_run(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    id = rig.submit(redis, rules, [answer()])
    rig.worker(redis, rules).serve(burst=True)
    verification = rig.verdict_of(redis, id)
    assert (verification["verdict"], verification["audited"]) == ("unaudited", False)


@pytest.mark.parametrize(("full", "form"), [(1.0, "full"), (0.0, "ids")])
def test_the_share_of_full_replays(redis: Redis, valkey_url: str, full: float, form: str) -> None:
    rules, reference = settings(valkey_url, audit={"full": full}), ToyReference()
    rig.submit(redis, rules, [answer()])
    rig.worker(redis, rules, {"toy": reference}).serve(burst=True)
    assert [request.form for request in reference.seen] == [form]


def test_the_audit_rate_decides_who_is_replayed(redis: Redis, valkey_url: str) -> None:
    rules, reference = settings(valkey_url, audit={"rate": 0.5}), ToyReference()
    ids = [rig.submit(redis, rules, [answer(length=2)]) for _ in range(60)]
    rig.worker(redis, rules, {"toy": reference}).serve(burst=True)
    audited = [rig.verdict_of(redis, id)["audited"] for id in ids]
    assert 12 <= sum(audited) <= 48
    assert sum(reference.batches) == sum(audited)


def test_a_second_run_changes_nothing(redis: Redis, valkey_url: str) -> None:
    rules, reference = settings(valkey_url), ToyReference()
    id = rig.submit(redis, rules, [answer()])
    rig.worker(redis, rules, {"toy": reference}).serve(burst=True)
    before = rig.verdict_of(redis, id)
    queue(redis).enqueue(VERIFY_JOB, id)
    rig.worker(redis, rules, {"toy": reference}).serve(burst=True)
    assert rig.verdict_of(redis, id) == before
    assert reference.batches == [1]


def test_a_verdict_that_came_first_stands(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    evidence = answer()
    loop = rig.worker(redis, rules, {"toy": ToyReference()})
    context.current().store.settle(unverified(evidence.id, "backlog", None, 1.0), None)
    rig.submit(redis, rules, [evidence])
    loop.serve(burst=True)
    assert rig.verdict_of(redis, evidence.id)["reasons"] == ["backlog"]


def test_expired_evidence(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    id = rig.submit(redis, rules, [answer()])
    redis.delete(evidence_key(id))
    rig.worker(redis, rules).serve(burst=True)
    verification = rig.verdict_of(redis, id)
    assert (verification["verdict"], verification["reasons"]) == ("unverified", ["evidence_expired"])
    assert verification["owner"] == "0" * 64


@pytest.mark.parametrize("packed", [b"", b"poison", b"\x28\xb5\x2f\xfd\x04\x00"])
def test_poison_gets_a_verdict_and_stays_visible(redis: Redis, valkey_url: str, packed: bytes) -> None:
    rules = settings(valkey_url)
    id = rig.submit(redis, rules, [answer()], packed=packed)
    good = rig.submit(redis, rules, [answer()])
    assert rig.worker(redis, rules).serve(burst=True) == 2
    assert rig.verdict_of(redis, id)["reasons"] == ["evidence_unreadable"]
    assert rig.verdict_of(redis, good)["verdict"] == "unaudited"
    assert queue(redis).failed_job_registry.get_job_ids() == [id]


def test_evidence_of_another_response_is_not_judged_under_this_id(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    evidence = answer()
    id = rig.submit(redis, rules, [evidence], packed=codec.pack([answer()]))
    rig.worker(redis, rules).serve(burst=True)
    assert rig.verdict_of(redis, id)["reasons"] == ["evidence_unreadable"]


def test_a_reference_that_comes_back_is_asked_again(redis: Redis, valkey_url: str) -> None:
    rules, reference = settings(valkey_url), ToyReference(failing("unreachable", 2))
    id = rig.submit(redis, rules, [answer()])
    rig.worker(redis, rules, {"toy": reference}).serve(burst=True)
    verification = rig.verdict_of(redis, id)
    distance = next(check for check in verification["checks"] if check["name"] == "distance")
    assert distance["reason"] != "unreachable"
    assert reference.batches == [1, 1, 1]


def test_a_reference_that_stays_away_leaves_the_distance_open(redis: Redis, valkey_url: str) -> None:
    rules, reference = settings(valkey_url), ToyReference(failing("unreachable"))
    id = rig.submit(redis, rules, [answer()])
    rig.worker(redis, rules, {"toy": reference}).serve(burst=True)
    verification = rig.verdict_of(redis, id)
    assert verification["verdict"] == "inconclusive"
    assert "unreachable" in verification["reasons"]
    assert len(reference.batches) == 4


def test_too_long_is_not_tried_again(redis: Redis, valkey_url: str) -> None:
    rules, reference = settings(valkey_url), ToyReference(failing("too_long"))
    id = rig.submit(redis, rules, [answer()])
    rig.worker(redis, rules, {"toy": reference}).serve(burst=True)
    assert "too_long" in rig.verdict_of(redis, id)["reasons"]
    assert reference.batches == [1]


def test_a_bug_ends_in_one_verdict_after_the_retries(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def broken(*_: object, **__: object) -> None:
        calls.append(1)
        raise ZeroDivisionError

    monkeypatch.setattr(jobs, "on_grounds", broken)
    rules = settings(valkey_url)
    evidence = answer()
    rig.submit(redis, rules, [evidence])
    job = Job.fetch(evidence.id, connection=redis, serializer=JSONSerializer)
    job.retry_intervals = [0]
    job.save()
    rig.worker(redis, rules).serve(burst=True)
    verification = rig.verdict_of(redis, evidence.id)
    assert verification["verdict"] == "unverified"
    assert verification["reasons"] == ["job_failed: ZeroDivisionError"]
    # Four tries, and a look at whose doing it is: with the answer and without it.
    assert len(calls) == 4 + 2


def test_rq_keeps_of_an_exception_its_type_and_place(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError(f"cannot judge {CANARY}")

    monkeypatch.setattr(jobs, "on_grounds", broken)
    rules = settings(valkey_url)
    id = rig.submit(redis, rules, [answer()])
    redis.hset(Job.key_for(id), "retries_left", 0)
    rig.worker(redis, rules).serve(burst=True)
    job = Job.fetch(id, connection=redis, serializer=JSONSerializer)
    result = job.latest_result()
    assert result is not None
    assert str(result.exc_string).splitlines()[0] == "ZeroDivisionError"
    assert " in broken" in str(result.exc_string)
    assert CANARY not in str(result.exc_string) + str(redis.hgetall(job.key))


def test_a_job_over_its_time_ends_and_is_tried_again(redis: Redis, valkey_url: str) -> None:
    slow = [3.5]

    def trouble(_requests: object) -> None:
        time.sleep(slow.pop() if slow else 0)

    # The second try has as long as the first one.
    rules = settings(valkey_url, verification={"job_timeout": 2})
    id = rig.submit(redis, rules, [answer()])
    stop = threading.Event()
    reference = ToyReference(trouble, threads=2)
    loop = rig.worker(redis, rules, {"toy": reference}, stop)
    rig.stop_when_decided(redis, id, stop)
    loop.serve()
    assert rig.verdict_of(redis, id)["audited"] is True
    assert reference.batches == [1, 1]


def test_waiting_retries_are_released_when_due(redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_endings, "RETRY_SECONDS", (1, 1, 1))
    rules, reference = settings(valkey_url), ToyReference(failing("timeout", 1))
    id = rig.submit(redis, rules, [answer()])
    stop = threading.Event()
    loop = rig.worker(redis, rules, {"toy": reference}, stop)
    rig.stop_when_decided(redis, id, stop)
    began = time.monotonic()
    loop.serve()
    assert time.monotonic() - began >= 1
    assert reference.batches == [1, 1]


def test_a_client_seed_is_marked(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    evidence = answer(sampling=Sampling(temperature=0.0, seed=1, client_seed=True, max_tokens=12))
    rig.submit(redis, rules, [evidence])
    rig.worker(redis, rules).serve(burst=True)
    assert rig.verdict_of(redis, evidence.id)["client_seed"] is True


def test_an_unknown_model_is_still_checked(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url)
    evidence = replace(answer(), model="gone")
    rig.submit(redis, rules, [evidence])
    rig.worker(redis, rules, {"toy": ToyReference()}).serve(burst=True)
    assert rig.verdict_of(redis, evidence.id)["audited"] is False
