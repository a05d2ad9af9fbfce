"""`python -m verifier_pool.ready` about arguments and settings with which no worker would start."""

from __future__ import annotations

import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis import Redis
from rq import SimpleWorker
from rq.utils import now, utcformat
from rq.worker_registration import REDIS_WORKER_KEYS

from policies.settings import Settings
from tests.verifier_pool import rig
from verifier_pool import ready
from verifier_pool.link.queue import VERIFY_QUEUE
from verifier_pool.parents import began

REFERENCE = {"kind": "vllm_http", "url": "http://127.0.0.1:9"}
MODELS = {"toy": {"reference": REFERENCE}, "bare": {}}


def config(folder: Path, url: str, **changes: Any) -> str:
    path = folder / "countersign.yaml"
    path.write_text(yaml.safe_dump({"redis_url": url, "models": MODELS} | changes))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--only", "replay", "--model", "typo"], "--model"),
        (["--model", "typo"], "--model"),
        (["--only", "replay", "--model", "bare"], "models"),
        (["--only", "replay", "--reference", "second"], "models"),
        (["--reference", "second"], "models"),
        (["--model", "toy", "--reference", "second"], "models"),
    ],
)
@pytest.mark.parametrize("alive", [[], ["--alive"]])
def test_nothing_to_do_is_never_ready(
    redis: Redis,
    valkey_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    key: str,
    alive: list[str],
) -> None:
    assert ready.main(["--config", config(tmp_path, valkey_url), *arguments, *alive]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert key in line


@pytest.mark.parametrize("changes", [{"nonsense": 1}, {"redis_url": "nonsense"}, {"models": []}])
def test_bad_settings_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object]
) -> None:
    assert ready.main(["--config", config(tmp_path, "redis://127.0.0.1:1", **changes)]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_settings_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert ready.main(["--config", "/nowhere/countersign.yaml"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "--config" in line


def test_arguments_are_the_workers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ready.main(["--only", "verify", "--model", "toy"])
    assert caught.value.code == 2
    assert "--model" in capsys.readouterr().err


@pytest.mark.parametrize(("alive", "code"), [([], 1), (["--alive"], 0)])
def test_a_store_that_is_away(tmp_path: Path, alive: list[str], code: int) -> None:
    assert ready.main(["--config", config(tmp_path, f"unix://{tmp_path}/none.sock"), *alive]) == code


def test_a_killed_worker_is_not_ready_though_it_is_listed(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    arguments = ["--config", config(tmp_path, valkey_url), "--only", "verify"]
    code = "import sys; from verifier_pool.worker import main; sys.exit(main(sys.argv[1:]))"
    process = rig.start(code, *arguments)
    try:
        rig.wait_until(lambda: ready.main(arguments) == 0)
    finally:
        process.kill()
        process.wait()
    assert redis.smembers(REDIS_WORKER_KEYS)
    assert ready.main(arguments) == ready.main([*arguments, "--alive"]) == 1


def test_a_successor_with_the_same_process_id_is_not_who_entered_itself(redis: Redis, valkey_url: str) -> None:
    worker = SimpleWorker([VERIFY_QUEUE], connection=redis)
    rules = Settings.model_validate({"redis_url": valkey_url})
    worker.register_birth()  # type: ignore[no-untyped-call]
    assert ready.queues_of(rules, socket.gethostname()) == {VERIFY_QUEUE}
    start = began(os.getpid())
    assert start is not None
    assert time.time() - 3600 < start <= time.time() + 1
    redis.hset(worker.key, "birth", utcformat(datetime.fromtimestamp(start - 60, UTC)))
    assert not ready.queues_of(rules, socket.gethostname())
    redis.hset(worker.key, mapping={"birth": utcformat(now()), "pid": "rubbish"})
    assert not ready.queues_of(rules, socket.gethostname())
