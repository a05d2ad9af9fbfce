"""Worker processes with one kind of work each, as an operator starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis import Redis

from policies.errors import SettingsError
from policies.settings import Settings
from tests.support.waiting import PATIENCE
from tests.verifier_pool import rig
from tests.verifier_pool.toy import VOCAB, ToyReference, answer, settings
from verifier_pool import RQ_PREFIX, context, worker
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import VERIFY_QUEUE
from verifier_pool.replay_loop import ReplayLoop
from verifier_pool.replays import outcome_key, queue_of, replay_job, request_key

REPLAYS = """
import os, sys, time
from pathlib import Path
from tests.verifier_pool.toy import ToyReference
from verifier_pool import context, replay_endings, worker
from verifier_pool.link import fair, queue
from verifier_pool.loop import Loop

config, marks, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
Loop.patience, Loop.pulse = 2, 0.3
replay_endings.RETRY_SECONDS = fair.RETRY_SECONDS = queue.RETRY_SECONDS = (0, 0, 0)

def trouble(requests):
    with marks.open("a") as file:
        file.write(f"{requests[0].prompt_ids[0]}\\n")
    time.sleep(seconds)
    if requests[0].prompt_ids[0] == 63:
        os._exit(9)

toy = ToyReference(trouble, threads=64)
context.open_references = lambda settings, second=False, model=None: {} if second else {"toy": toy}
init = Loop.__init__
Loop.__init__ = lambda self, *a, **k: init(self, *a, **(k | {"maintenance_interval": 1}))
sys.exit(worker.main(["--config", config, "--only", "replay", "--model", "toy"]))
"""
REFERENCE = {"kind": "vllm_http", "url": "http://127.0.0.1:9"}

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def config(valkey_url: str, tmp_path: Path) -> Path:
    path = tmp_path / "countersign.yaml"
    backend = {"name": "honest", "url": "http://127.0.0.1:1", "model": "toy"}
    models = {"toy": {"vocab_size": VOCAB, "reference": REFERENCE}}
    path.write_text(yaml.safe_dump({"redis_url": valkey_url, "models": models, "backends": [backend]}))
    return path


@pytest.fixture
def start(config: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts `countersign worker` with these arguments, or the toy's replays for `seconds` each."""
    processes: list[subprocess.Popen[bytes]] = []

    def run(*arguments: str, seconds: float | None = None) -> subprocess.Popen[bytes]:
        if seconds is None:
            command = [sys.executable, "-m", "countersign", "worker", "--config", str(config), *arguments]
            processes.append(subprocess.Popen(command, cwd=rig.ROOT))
        else:
            processes.append(rig.start(REPLAYS, str(config), str(tmp_path / "marks"), str(seconds)))
        return processes[-1]

    yield run
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(PATIENCE)


def submit(redis: Redis, rules: Settings, count: int, **changes: Any) -> list[str]:
    return [rig.submit(redis, rules, [answer(**changes)]) for _ in range(count)]


def test_each_kind_of_work_in_processes_of_its_own(redis: Redis, valkey_url: str, start: Start) -> None:
    cpu = start("--only", "verify", "--processes", "2")
    start(seconds=0.01)
    start(seconds=0.01)
    rig.wait_until(lambda: redis.scard(RQ_PREFIX + ":workers:" + VERIFY_QUEUE) == 2)
    ids = submit(redis, settings(valkey_url), 60)
    for id in ids:
        assert rig.verdict_of(redis, id)["audited"] is True
    cpu.terminate()
    assert cpu.wait(PATIENCE) == 0
    assert redis.scard(RQ_PREFIX + ":workers:" + VERIFY_QUEUE) == 0


def test_a_verifying_process_that_dies_is_started_again(redis: Redis, valkey_url: str, start: Start) -> None:
    start("--only", "verify", "--processes", "2")
    workers = RQ_PREFIX + ":workers:" + VERIFY_QUEUE
    rig.wait_until(lambda: redis.scard(workers) == 2)
    (key, *_) = redis.smembers(workers)
    os.kill(int(redis.hget(key, "pid") or 0), signal.SIGKILL)
    rig.wait_until(lambda: len(set(redis.smembers(workers)) - {key}) == 2)


def test_a_killed_replay_process_leaves_its_replays_to_the_next(
    redis: Redis, valkey_url: str, start: Start, tmp_path: Path
) -> None:
    ids = submit(redis, settings(valkey_url), 20)
    start("--only", "verify")
    victim = start(seconds=60)
    marks = tmp_path / "marks"
    rig.wait_until(lambda: marks.exists() and len(marks.read_text().split()) == 20)
    victim.kill()
    victim.wait()
    start(seconds=0)
    for id in ids:
        assert rig.verdict_of(redis, id)["audited"] is True
    assert len(marks.read_text().split()) == 40
    assert not FairQueue(queue_of("toy"), connection=redis).failed_job_registry.get_job_ids()


def test_evidence_that_kills_its_process_takes_nothing_else_down_twice(
    redis: Redis, valkey_url: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.no_waits(monkeypatch)
    rules = settings(valkey_url)
    innocents = [rig.submit(redis, rules, [answer((first, 5, 7))]) for first in range(10)]
    poison = rig.submit(redis, rules, [answer((63, 5, 7))])
    verifying = rig.worker(redis, rules, {"toy": ToyReference()}).loop
    verifying.serve(burst=True)
    letters = FairQueue(queue_of("toy"), connection=redis).failed_job_registry
    assert all(redis.exists(request_key(id)) for id in (*innocents, poison))
    deaths = 0
    while not letters.get_job_ids():
        process = start(seconds=0.3)
        rig.wait_until(lambda run=process: run.poll() is not None or letters.get_job_ids())  # type: ignore[misc]
        deaths += process.poll() == 9
        assert deaths <= 4
    assert letters.get_job_ids() == [replay_job(poison)]
    assert deaths == 4
    decided = context.current().store.decided
    rig.wait_until(lambda: (verifying.serve(burst=True), all(map(decided, (*innocents, poison))))[1])
    for id in innocents:
        assert "replay_failed" not in str(rig.verdict_of(redis, id)["reasons"])
    replayed = Counter((tmp_path / "marks").read_text().split())
    assert replayed.pop("63") == 4
    # At most with the poison the first time, and alone the second; some end before it takes its process down.
    assert len(replayed) == 10
    assert set(replayed.values()) <= {1, 2}
    verdict = rig.verdict_of(redis, poison)
    assert verdict["verdict"] == "inconclusive"
    assert "replay_failed: AbandonedJobError" in verdict["reasons"]


def test_all_in_one_until_nothing_is_left(
    redis: Redis, valkey_url: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = ToyReference()
    monkeypatch.setattr(
        context, "open_references", lambda _, second=False, model=None: {} if second else {"toy": reference}
    )
    ids = submit(redis, settings(valkey_url), 20)
    assert worker.main(["--config", str(config), "--burst"]) == 0
    assert all(rig.verdict_of(redis, id)["audited"] is True for id in ids)
    assert reference.closed


def test_each_kind_alone_until_nothing_is_left(
    redis: Redis, valkey_url: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        context, "open_references", lambda _, second=False, model=None: {} if second else {"toy": ToyReference()}
    )
    (id,) = submit(redis, settings(valkey_url), 1)
    arguments = ["--config", str(config), "--burst", "--only"]
    assert worker.main([*arguments, "verify"]) == 0
    assert redis.exists(request_key(id))
    assert worker.main([*arguments, "replay"]) == 0
    assert redis.exists(outcome_key(id))
    assert worker.main([*arguments, "verify", "--processes", "2"]) == 0
    assert rig.verdict_of(redis, id)["audited"] is True


@pytest.mark.parametrize(
    ("arguments", "models", "key"),
    [
        (["--only", "replay"], {"toy": {}}, "models"),
        (["--only", "replay", "--model", "other"], {"toy": {"reference": REFERENCE}}, "--model"),
        (["--only", "replay", "--reference", "second"], {"toy": {"reference": REFERENCE}}, "models"),
        (["--reference", "second"], {"toy": {"reference": REFERENCE}}, "models"),
        (["--model", "other"], {"toy": {"reference": REFERENCE}}, "--model"),
        (["--model", "other"], {"toy": {"reference": REFERENCE}, "other": {}}, "models"),
        (["--only", "verify", "--processes", "2"], {"toy": {"profile": "/nowhere.json"}}, "models.toy.profile"),
    ],
)
def test_what_cannot_start_says_so(
    valkey_url: str, tmp_path: Path, arguments: list[str], models: dict[str, Any], key: str
) -> None:
    path = tmp_path / "countersign.yaml"
    path.write_text(yaml.safe_dump({"redis_url": valkey_url, "models": models}))
    with pytest.raises(SettingsError) as caught:
        worker.main(["--config", str(path), *arguments])
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--processes", "4"], "--processes"),
        (["--processes", "0", "--only", "verify"], "--processes"),
        (["--processes", "-3"], "--processes"),
        (["--only", "replay", "--processes", "3"], "--processes"),
        (["--only", "webhooks", "--processes", "2"], "--processes"),
        (["--only", "verify", "--model", "zzz"], "--model"),
        (["--only", "verify", "--processes", "2", "--model", "toy"], "--model"),
        (["--only", "webhooks", "--reference", "second"], "--reference"),
        (["--only", "verify", "--reference", "first"], "--reference"),
    ],
)
def test_an_argument_that_would_do_nothing_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        worker.main(["--config", str(config), *arguments])
    assert caught.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_a_replay_thread_that_breaks_ends_the_process(
    redis: Redis, valkey_url: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        context, "open_references", lambda _, second=False, model=None: {} if second else {"toy": ToyReference()}
    )

    def broken(*_: object, **__: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(ReplayLoop, "serve", broken)
    with pytest.raises(ZeroDivisionError):
        worker.main(["--config", str(config)])
