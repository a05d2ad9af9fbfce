"""An answer that breaks a check is no way out for its backend, and no fault of its backend's where anything breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from redis import Redis
from rq.job import Job
from rq.serializers import JSONSerializer

from policies import coverage
from policies.evidence import Evidence
from policies.unit import Unit
from tests.verifier_pool import rig
from tests.verifier_pool.toy import answer, settings
from verifier_pool import jobs
from verifier_pool import judge as judging
from verifier_pool.link.queue import units_key
from verifier_pool.whose import unanswered, whose


def _breaking(monkeypatch: pytest.MonkeyPatch, broken: Callable[[Sequence[Evidence]], object]) -> None:
    judge = judging.on_grounds

    def judged(choices: Sequence[Evidence], grounds: Any) -> Any:
        broken(choices)
        return judge(choices, grounds)

    monkeypatch.setattr(jobs, "on_grounds", judged)


def _failed(redis: Redis, valkey_url: str) -> dict[str, Any]:
    rules = settings(valkey_url, audit={"rate": 0.0})
    evidence = answer()
    rig.submit(redis, rules, [evidence])
    job = Job.fetch(evidence.id, connection=redis, serializer=JSONSerializer)
    job.retry_intervals = [0]
    job.save()
    rig.worker(redis, rules).serve(burst=True)
    return dict(rig.verdict_of(redis, evidence.id)) | {"tokens": len(evidence.output_ids)}


def test_an_answer_that_breaks_a_check_is_its_backends(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _breaking(monkeypatch, lambda choices: 1 // (choices[0].output_ids.size == 0))
    monkeypatch.setattr(jobs, "_fold", lambda *_: None)
    verification = _failed(redis, valkey_url)
    assert (verification["verdict"], verification["reasons"]) == ("unverified", ["unjudgeable: ZeroDivisionError"])
    assert coverage.of(verification) == ("unjudgeable", coverage.BACKEND)
    (unit,) = [msgspec.json.decode(data, type=Unit) for data in redis.lrange(units_key("honest"), 0, -1)]
    assert (unit.blame, unit.tokens) == (coverage.BACKEND, verification["tokens"])
    assert unit.tokens


def test_a_request_that_breaks_a_check_is_not(redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _breaking(monkeypatch, lambda choices: 1 // (not choices[0].request))
    verification = _failed(redis, valkey_url)
    assert verification["reasons"] == ["job_failed: ZeroDivisionError"]
    assert coverage.of(verification) == ("job_failed", coverage.OURS)


def _once(choices: Sequence[Evidence]) -> None:
    if choices[0].output_ids.size:
        raise IndexError


@pytest.mark.parametrize("reason", ["job_failed", "evidence_expired", "replay_failed: X", "job_failed: MemoryError"])
def test_other_reasons_stay(reason: str) -> None:
    assert whose(reason, [answer()], _once) == reason


def test_what_breaks_nothing_any_more_was_ours() -> None:
    assert whose("job_failed: IndexError", [answer()], lambda _: None) == "job_failed: IndexError"
    assert whose("job_failed: IndexError", [answer()], _once) == "unjudgeable: IndexError"


@pytest.mark.parametrize("error", [OSError, MemoryError, ImportError])
def test_a_machine_that_cannot_judge_says_nothing(error: type[Exception]) -> None:
    def broken(_: Sequence[Evidence]) -> None:
        raise error

    assert whose("job_failed: IndexError", [answer()], broken) == "job_failed: IndexError"


def test_without_its_answer_a_choice_is_judged(redis: Redis, valkey_url: str) -> None:
    rig.worker(redis, rules := settings(valkey_url))
    found = judging.judge([unanswered(answer())], model=rules.models["toy"])
    assert found["verdict"] in ("withheld", "inconclusive", "reject")
