"""`countersign queue`: what it shows, and what it does about jobs that failed for good."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from redis import Redis
from rq.job import Job
from rq.serializers import JSONSerializer

import countersign
from policies.errors import ReplayError
from policies.receipt import digest
from policies.settings import Settings
from tests.verifier_pool import rig
from tests.verifier_pool.receiver import Receiver, listening, status
from tests.verifier_pool.test_webhooks import SECRET, hooked, run
from tests.verifier_pool.toy import ToyReference, answer, settings
from verifier_pool.jobs import verify
from verifier_pool.link import deliveries, fair, letters
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import (
    OPEN,
    VERIFY_JOB,
    VERIFY_QUEUE,
    WEBHOOK_QUEUE,
    evidence_key,
    verdict_key,
    waiting_key,
)
from verifier_pool.link.receipts import receipt_of
from verifier_pool.link.scripts import note_waiting
from verifier_pool.link.sealing import Sealer
from verifier_pool.replays import CANARIES, outcome_key, queue_of, request_key
from verifier_pool.stages import Stages
from verifier_pool.store import Store

CANARY = "a secret prompt"


class Command:
    """Runs the console script with settings from a file."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], url: str) -> None:
        self._config, self._capsys = folder / "countersign.yaml", capsys
        self.configure(redis_url=url)

    def configure(self, **more: Any) -> None:
        backend = {"name": "honest", "url": "http://127.0.0.1:1", "model": "toy"}
        tree = {"models": {"toy": {}}, "backends": [backend]} | more
        self._config.write_text(yaml.safe_dump(tree))

    def __call__(self, *arguments: str, code: int = 0) -> str:
        assert countersign.main(["queue", *arguments, "--config", str(self._config)]) == code
        found = self._capsys.readouterr()
        assert CANARY not in found.out + found.err
        assert "Traceback" not in found.out + found.err
        return found.out or found.err

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code))


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], valkey_url: str) -> Command:
    return Command(tmp_path, capsys, valkey_url)


def failed(redis: Redis, queue: str, job_id: str, text: str) -> None:
    """As rq does with a job that failed for good."""
    job = Job.fetch(job_id, connection=redis, serializer=JSONSerializer)
    assert FairQueue(queue, connection=redis).take(10) == [job_id]
    FairQueue(queue, connection=redis).intermediate_queue.remove(job_id)
    with redis.pipeline() as pipeline:
        job.set_status("failed", pipeline)  # type: ignore[arg-type]
        job._handle_failure(text, pipeline)
        pipeline.execute()


def submitted(redis: Redis, rules: Settings) -> str:
    """A generation whose first pass waits, as the recorder leaves it."""
    evidence = answer()
    id = evidence.id
    rig.submit(redis, rules, [evidence])
    Job.fetch(id, connection=redis, serializer=JSONSerializer).delete()
    given = fair.options(id, rules.verification, inline=True, tenant="o", tokens=15, size=100)
    FairQueue(VERIFY_QUEUE, connection=redis).enqueue(VERIFY_JOB, id, **given)
    note_waiting(redis, id, "honest", time.time() - 60, 3600, 100)
    return id


def test_nothing_is_shown_of_an_empty_redis(redis: Redis, command: Command) -> None:
    assert command.json("list") == {
        "queues": [],
        "backends": [{"backend": "honest", "waiting": 0, "oldest_seconds": None, "bytes": 0}],
        "references": [],
        "dead": [],
    }
    assert command("list").split("\n")[:2] == ["queues", "  none"]
    assert command("requeue", "--all") == command("drop", "--all") == ""


def test_queues_are_counted(redis: Redis, valkey_url: str, command: Command) -> None:
    rules = settings(valkey_url)
    for _ in range(3):
        submitted(redis, rules)
    taken = FairQueue(VERIFY_QUEUE, connection=redis).take(1)
    assert len(taken) == 1
    found = command.json("list")
    (queue,) = found["queues"]
    assert queue["queue"] == VERIFY_QUEUE
    assert queue["lanes"] == {"first": 0, "inline-judge": 0, "inline": 2, "async-judge": 0, "async": 0}
    assert (queue["waiting"], queue["in_flight"], queue["later"], queue["dead"]) == (2, 1, 0, 0)
    assert queue["workers"] == 0
    assert 0 <= queue["oldest_seconds"] < 10
    (backend,) = found["backends"]
    assert (backend["backend"], backend["waiting"], backend["bytes"]) == ("honest", 3, 300)
    assert 59 < backend["oldest_seconds"] < 70
    text = command("list")
    assert f"{VERIFY_QUEUE}        2" in text
    assert "honest" in text


def test_sick_references_are_seen(redis: Redis, valkey_url: str, command: Command) -> None:
    reference = {"kind": "vllm_http", "url": "http://127.0.0.1:1"}
    models = {"toy": {}, "a:b": {"reference": reference}, "well": {"reference": reference}}
    command.configure(redis_url=valkey_url, models=models)
    redis.hset(
        CANARIES, mapping={"a:b:passed": 7, "a:b:failed": 2, "a:b:restarts": 1, "a:b:unsound": 4, "gone:passed": 3}
    )
    assert command.json("list")["references"] == [
        {"model": "a:b", "passed": 7, "failed": 2, "restarts": 1, "unsound": 4},
        {"model": "gone", "passed": 3, "failed": 0, "restarts": 0, "unsound": 0},
        {"model": "well", "passed": 0, "failed": 0, "restarts": 0, "unsound": 0},
    ]
    lines = command("list").splitlines()
    at = lines.index("known answers replayed")
    assert [line.split() for line in lines[at + 1 : at + 3]] == [
        ["model", "passed", "failed", "restarts", "unsound"],
        ["a:b", "7", "2", "1", "4"],
    ]


def test_poison_evidence_is_shown_and_its_verdict_stays(redis: Redis, valkey_url: str, command: Command) -> None:
    rules = settings(valkey_url)
    id = rig.submit(redis, rules, [answer()], packed=CANARY.encode())
    rig.worker(redis, rules).serve(burst=True)
    (letter,) = command.json("list")["dead"]
    assert letter.pop("age_seconds") < 10
    assert letter == {
        "id": id,
        "job": id,
        "queue": VERIFY_QUEUE,
        "stage": "verify",
        "reason": "EvidenceError",
        "tries": 1,
        "backend": "honest",
        "model": "toy",
        "verdict": "unverified",
        "why": ["evidence_unreadable"],
    }
    assert "EvidenceError" in command("list")
    said = command("requeue", id, code=1)
    assert (
        said
        == f"{id}: not queued anew: its verdict is unverified (evidence_unreadable), and a verdict is written once\n"
    )
    assert command("requeue", "--all").startswith(f"{id}: not queued anew")
    assert FairQueue(VERIFY_QUEUE, connection=redis).count == 0
    before = redis.get(verdict_key(id))
    assert command.json("drop", id) == [{"job": id, "id": id, "done": True, "why": None}]
    assert command.json("list")["dead"] == []
    assert redis.get(verdict_key(id)) == before
    assert not redis.exists(Job.key_for(id))


def test_what_is_undecided_is_queued_anew(redis: Redis, valkey_url: str, command: Command) -> None:
    rules = settings(valkey_url)
    id = submitted(redis, rules)
    failed(redis, VERIFY_QUEUE, id, f"Traceback (most recent call last):\n  File\nvalue.ValueError: {CANARY}")
    redis.delete(OPEN, waiting_key("honest"))
    (letter,) = command.json("list")["dead"]
    assert (letter["reason"], letter["verdict"], letter["tries"]) == ("ValueError", None, 1)
    assert command("requeue", id) == f"{id}: queued anew\n"
    assert command.json("list")["dead"] == []
    assert redis.zscore(OPEN, id)
    assert redis.zscore(waiting_key("honest"), id)
    rig.worker(redis, rules).serve(burst=True)
    assert rig.verdict_of(redis, id)["verdict"] == "unaudited"


def test_without_evidence_nothing_can_be_done(redis: Redis, valkey_url: str, command: Command) -> None:
    id = submitted(redis, settings(valkey_url))
    failed(redis, VERIFY_QUEUE, id, "Job was stuck in intermediate queue.")
    redis.delete(evidence_key(id))
    assert command.json("list")["dead"][0]["reason"] == "NeverStarted"
    (said,) = command.json("requeue", id, code=1)
    assert not said["done"]
    assert "evidence expired" in said["why"]


def test_what_is_dropped_undecided_ends_unverified(redis: Redis, valkey_url: str, command: Command) -> None:
    id = submitted(redis, settings(valkey_url))
    failed(redis, VERIFY_QUEUE, id, "Moved to FailedJobRegistry, due to AbandonedJobError, at now")
    command("drop", id)
    verdict = Store(redis, verdict_ttl=600).verdict(id)
    assert verdict is not None
    assert (verdict["verdict"], verdict["reasons"]) == ("unverified", ["job_failed: AbandonedJobError"])
    assert command.json("list")["dead"] == []
    assert redis.zscore(OPEN, id) is None


def test_the_receipt_of_what_is_dropped_tells_of_sealed_evidence(
    redis: Redis, valkey_url: str, command: Command
) -> None:
    id, key = submitted(redis, settings(valkey_url)), base64.b64encode(bytes(32)).decode()
    plain = cast(bytes, redis.get(evidence_key(id)))
    redis.set(evidence_key(id), Sealer([bytes(32)]).seal(plain, evidence_key(id).encode()))
    command.configure(redis_url=valkey_url, storage={"encryption_keys": key})
    failed(redis, VERIFY_QUEUE, id, "Moved to FailedJobRegistry, due to AbandonedJobError, at now")
    command("drop", id)
    stored = receipt_of(redis, id)
    assert stored is not None
    payload = base64.urlsafe_b64decode(stored.token.split(".")[1] + "==")
    assert json.loads(payload)["sha256"]["evidence"] == digest(plain)


def asked(redis: Redis, rules: Settings, id: str) -> None:
    """Its first pass asked for a replay, which failed for good."""
    rig.worker(redis, rules, {"toy": ToyReference()})
    FairQueue(VERIFY_QUEUE, connection=redis).empty()
    assert verify(id) == "replaying"
    failed(redis, queue_of("toy"), id + "-r", "EngineDead\n  engine.py:1 in step")


def test_a_replay_is_asked_for_again(redis: Redis, valkey_url: str, command: Command) -> None:
    rules = settings(valkey_url, audit={"rate": 1.0})
    id = submitted(redis, rules)
    asked(redis, rules, id)
    (letter,) = command.json("list")["dead"]
    assert (letter["id"], letter["job"], letter["stage"], letter["reason"]) == (id, id + "-r", "replay", "EngineDead")
    assert command("requeue", id) == f"{id}-r: queued anew\n"
    rig.worker(redis, rules, {"toy": ToyReference()}).serve(burst=True)
    assert rig.verdict_of(redis, id)["audited"] is True


def test_a_dropped_replay_is_judged_without(redis: Redis, valkey_url: str, command: Command) -> None:
    rules = settings(valkey_url, audit={"rate": 1.0})
    id = submitted(redis, rules)
    asked(redis, rules, id)
    command("drop", id + "-r")
    assert redis.exists(outcome_key(id))
    assert not redis.exists(request_key(id))
    (said,) = command.json("requeue", id + "-r", code=1)
    assert said["why"] == "there is no such dead letter"
    rig.worker(redis, rules, {"toy": ToyReference()}).serve(burst=True)
    verdict = rig.verdict_of(redis, id)
    assert verdict["verdict"] == "inconclusive"


def test_a_replay_that_is_given_up_is_not_asked_for_again(redis: Redis, valkey_url: str, command: Command) -> None:
    rules = settings(valkey_url, audit={"rate": 1.0})
    id = submitted(redis, rules)
    asked(redis, rules, id)
    Stages(redis, rules.verification).give_up(id, ReplayError("replay_failed").reason, second=False)
    (said,) = command.json("requeue", id, code=1)
    assert said["why"] == "its generation is being judged without this replay"


@pytest.mark.parametrize("how", [["--all"], ["webhook-settings-1"], ["a" * 32]])
def test_a_webhook_is_sent_again(
    redis: Redis, valkey_url: str, tmp_path: Path, command: Command, how: Sequence[str]
) -> None:
    with listening(Receiver(status(500))) as receiver:
        run(redis, hooked(valkey_url, receiver, ()), "a" * 32)
    (letter,) = command.json("list")["dead"]
    assert (letter["stage"], letter["reason"], letter["id"]) == ("webhook", "DeliveryFailed", "a" * 32)
    assert "no webhook" in command.json("requeue", *how, code=how != ["--all"])[0]["why"]
    state = deliveries.state_key("settings")
    with listening(Receiver(status(200))) as again:
        webhook = {"url": again.url, "secret": SECRET, "allow_private": True}
        command.configure(redis_url=valkey_url, webhook=webhook)
        redis.hset(state, mapping={"disabled": "gone", "disabled_url": again.url})
        assert "switched off" in command.json("requeue", *how, code=how != ["--all"])[0]["why"]
        redis.delete(state)
        assert command.json("requeue", *how)[0]["done"]
        run(redis, hooked(valkey_url, again, ()))
        assert len(again.requests) == 1
    assert command.json("list")["dead"] == []
    assert FairQueue(WEBHOOK_QUEUE, connection=redis).count == 0


def test_what_a_webhook_told_expired(redis: Redis, valkey_url: str, command: Command) -> None:
    with listening(Receiver(status(500))) as receiver:
        run(redis, hooked(valkey_url, receiver, ()), "b" * 32)
        command.configure(redis_url=valkey_url, webhook={"url": receiver.url, "secret": SECRET, "allow_private": True})
    redis.delete(deliveries.delivery_key("settings-1"))
    (letter,) = command.json("list")["dead"]
    assert letter["id"] == "settings-1"
    assert "expired" in command.json("requeue", letter["id"], code=1)[0]["why"]
    assert command.json("drop", letter["job"])[0]["done"]


def test_damaged_letters_are_shown_and_dropped(redis: Redis, valkey_url: str, command: Command) -> None:
    queue = FairQueue(VERIFY_QUEUE, connection=redis)
    redis.sadd(FairQueue.redis_queues_keys, queue.key, "{countersign}:rq:queue:somebody-elses")
    redis.zadd(queue.failed_job_registry.key, {"gone": 2**40, "bad\x1b[31m": 2**40})
    redis.hset(Job.key_for("gone"), mapping={"meta": b"\xff{", "ended_at": "never"})
    found = command.json("list")
    assert {letter["job"] for letter in found["dead"]} == {"gone", "bad\x1b[31m"}
    assert [each["queue"] for each in found["queues"]] == [VERIFY_QUEUE]
    assert "\x1b" not in command("list")
    command("drop", "--all")
    assert command.json("list")["dead"] == []


@pytest.mark.parametrize("arguments", [[], ["list", "x"], ["requeue"], ["drop"], ["drop", "--all", "x"], ["show"]])
def test_wrong_usage(command: Command, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command(*arguments)
    assert caught.value.code == 2


def test_without_redis(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    command.configure(redis_url="redis://127.0.0.1:1")
    assert "Redis does not answer" in command("list", code=1)
    command.configure(redis_url="redis+nothing://x")
    assert "redis_url" in command("list", code=3)


def test_reasons_never_quote_a_message() -> None:
    found = [
        letters._reason(text)
        for text in (
            None,
            "",
            "1 2 3",
            "  ",
            "Traceback (most recent call last):\n x\na.b.Error: secret",
            "Kind\n  f:1 in g",
        )
    ]
    assert found == ["?", "?", "?", "?", "Error", "Kind"]
