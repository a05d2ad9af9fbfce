"""The fair queue against a small model of its order, on a real Valkey."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis
from rq import Queue, SimpleWorker
from rq.job import Job
from rq.serializers import JSONSerializer

from tests.support.waiting import ends
from tests.verifier_pool.fair_model import RULES, Model, clean, name, push
from verifier_pool.link import fair
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import VERIFY_JOB

PLAIN = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
TENANTS = st.sampled_from("ABC")

PUSH = st.tuples(st.just("push"), st.integers(0, 3), TENANTS, st.integers(1, 50))
RETRY = st.tuples(st.just("rq"), st.integers(1, 50))
TAKE = st.tuples(st.just("take"), st.integers(1, 12), st.none() | st.integers(0, 80), st.booleans())
GONE = st.tuples(st.sampled_from(["expired", "deleted", "cancelled", "removed"]), st.integers(0, 100))


@PLAIN
@given(st.lists(st.one_of(PUSH, PUSH, PUSH, RETRY, TAKE, GONE), max_size=60))
def test_the_order_is_the_models(redis: Redis, steps: list[tuple[object, ...]]) -> None:
    queue, model, number = clean(redis), Model(), 0
    taken: list[str] = []
    for step in steps:
        match step:
            case ("push", int(lane), str(tenant), int(cost)):
                id, number = name(number), number + 1
                push(queue, id, lane=lane, tenant=tenant, cost=cost)
                model.push(id, lane, tenant, cost)
            case ("rq", int(cost)):
                id, number = name(number), number + 1
                rqs = Queue("q", connection=redis, serializer=JSONSerializer)
                rqs.enqueue(VERIFY_JOB, id, job_id=id, meta={"tokens": cost})
                model.first.append(id)
                model.costs[id] = cost
            case ("take", int(n), None | int() as tokens, bool(alone)):
                found = queue.take(n, tokens=tokens, alone=alone)
                assert found == model.take(n, tokens, alone)
                assert redis.lrange(queue.intermediate_queue_key, 0, -1)[len(taken) :] == [id.encode() for id in found]
                taken += found
            case (str(how), int(which)) if number:
                id = name(which % number)
                if id in model.gone or id not in model.waiting():
                    continue
                match how:
                    case "expired":
                        redis.delete(Job.key_for(id))
                    case "deleted":
                        Job.fetch(id, redis, serializer=JSONSerializer).delete()
                    case "cancelled":
                        Job.fetch(id, redis, serializer=JSONSerializer).cancel()
                    case "removed":
                        assert queue.remove(id) == 1
                model.gone.add(id)
                if id in model.first and how != "expired":
                    model.first.remove(id)
                for at, lane_ in enumerate(model.lanes):
                    if how == "removed" and any(each == id for _, each in lane_):
                        lane_[:] = [each for each in lane_ if each[1] != id]
                        if not lane_:
                            model.ends[at], model.clocks[at] = {}, 0.0
        assert set(queue.get_job_ids()) == model.waiting()
        assert queue.count == len(model.waiting())
        in_lanes = {id for lane in range(1, 5) for id in redis.zrange(f"{queue.key}:lane{lane}", 0, -1)}
        assert set(redis.zrange(queue.since_key, 0, -1)) == in_lanes
    rest = queue.take(1000)
    assert rest == model.take(1000, None, True)
    assert len({*taken, *rest}) == len(taken) + len(rest) == number - len(model.gone - {*taken})
    own = (b":lane", b":state", b":bell", b":since")
    assert {key for key in redis.keys("*q*") if any(part in key for part in own)} == set()


@PLAIN
@given(
    st.lists(st.tuples(TENANTS, st.integers(1, 100)), min_size=10, max_size=150),
    st.integers(0, 1000),
)
def test_tenants_that_wait_are_served_alike(redis: Redis, jobs: list[tuple[str, int]], seed: int) -> None:
    queue = clean(redis)
    of = {name(seed + at): job for at, job in enumerate(jobs)}
    for id, (tenant, cost) in of.items():
        push(queue, id, tenant=tenant, cost=cost)
    left = Counter(tenant for tenant, _ in jobs)
    largest = {who: max((cost for tenant, cost in jobs if tenant == who), default=0) for who in "ABC"}
    served: dict[str, int] = defaultdict(int)
    mine: dict[str, list[str]] = defaultdict(list)
    while ids := queue.take(1):
        tenant, cost = of[ids[0]]
        mine[tenant].append(ids[0])
        both = [(one, two) for one in left for two in left if one < two and left[one] and left[two]]
        left[tenant] -= 1
        served[tenant] += cost
        for one, two in both:
            assert abs(served[one] - served[two]) <= largest[one] + largest[two]
    for tenant, ids in mine.items():
        assert ids == [id for id, (whose, _) in of.items() if whose == tenant], "a tenant's jobs keep their order"


def test_a_flood_does_not_hold_up_another_tenant(redis: Redis) -> None:
    queue = clean(redis)
    for number in range(500):
        push(queue, name(number), tenant="flood", cost=10)
    assert len(queue.take(100)) == 100
    push(queue, "late", tenant="quiet", cost=10)
    assert "late" in queue.take(2)


def test_inline_goes_first_and_every_eighth_comes_from_below(redis: Redis) -> None:
    queue = clean(redis)
    lanes = {}
    for number in range(400):
        lanes[name(number)] = number % 4
        push(queue, name(number), lane=number % 4)
    order = [lanes[id] for id in queue.take(96)]
    assert order.count(0) == 84
    assert [order.count(lane) for lane in (1, 2, 3)] == [4, 4, 4]
    assert all(lane == 0 for at, lane in enumerate(order, 1) if at % 8)


def test_no_lane_starves_while_another_comes_and_goes(redis: Redis) -> None:
    queue, number, found = clean(redis), 0, 0
    for number in range(50):
        push(queue, f"low{number}", lane=3)
    for turn in range(1, 241):
        push(queue, f"top{turn}", lane=0)
        push(queue, f"top{turn}b", lane=0)
        if turn % 16 == 8:
            push(queue, f"mid{turn}", lane=1)
        (id,) = queue.take(1)
        found += id.startswith("low")
    assert found >= 240 // 8 // 2


@pytest.mark.parametrize("bound", [10, 100])
def test_a_longer_one_runs_alone(redis: Redis, bound: int) -> None:
    queue = clean(redis)
    push(queue, "long", cost=1000)
    push(queue, "short", cost=1)
    assert queue.take(10, tokens=bound, alone=False) == []
    assert queue.take(10, tokens=bound) == ["long"]
    assert queue.take(10, tokens=bound) == ["short"]


def test_a_retry_keeps_its_lane_and_costs_nothing(redis: Redis) -> None:
    queue = clean(redis)
    job = push(queue, "again", tenant="A", cost=500)
    push(queue, "other", tenant="B", cost=1)
    assert queue.take(1) == ["again"]
    with redis.pipeline() as pipeline:
        job.prepare_for_execution("w", pipeline)
        pipeline.execute()
    push(queue, "new", tenant="A", cost=1)
    queue._enqueue_job(Job.fetch("again", redis, serializer=JSONSerializer))
    push(queue, "client-waits", lane=1)
    assert queue.take(1) == ["client-waits"]
    assert sorted(queue.take(2)) == ["again", "other"]
    assert queue.take(1) == ["new"]


def test_queued_twice_it_is_taken_once(redis: Redis) -> None:
    queue = clean(redis)
    for _ in range(3):
        push(queue, "id")
    Queue("q", connection=redis).push_job_id("id")
    assert queue.take(10) == ["id"]
    assert queue.count == 0


def test_the_last_tenant_leaves_no_trace(redis: Redis) -> None:
    queue = clean(redis)
    for number in range(300):
        push(queue, name(number), tenant=f"t{number}", cost=5)
        push(queue, name(1000 + number), tenant="t0", cost=5)
        queue.take(1)
        queue.take(1)
    assert queue.count == 0
    assert queue.take(1) == []
    assert [*redis.scan_iter("*:queue:q*")] == [queue.intermediate_queue_key.encode()]
    push(queue, "stays", tenant="busy", cost=10**6)
    for number in range(300):
        push(queue, f"n{number}", tenant=f"t{number}", cost=5)
        push(queue, f"m{number}", tenant="busy", cost=5)
        queue.take(1)
    assert redis.zcard(f"{queue.key}:lane4:ends") <= 302


def test_a_queue_with_many_expired_jobs_gives_the_next_living_one(redis: Redis) -> None:
    queue = clean(redis)
    pipeline = redis.pipeline()
    for number in range(2500):
        pipeline.zadd(f"{queue.key}:lane4", {f"dead{number:04}": 0})
    pipeline.execute()
    push(queue, "living", cost=3)
    assert queue.take(1) == ["living"]
    assert queue.take(1) == []


def test_whoever_waits_is_woken(redis: Redis) -> None:
    queue = clean(redis)
    timer = threading.Timer(0.2, push, (FairQueue("q", connection=redis), "id"))
    began = time.monotonic()
    timer.start()
    assert ends(lambda: queue.take(5, wait=3600)) == ["id"]
    assert time.monotonic() - began > 0.1
    timer.join()
    assert queue.take(5, wait=0.2) == []


def test_many_takers_share_without_loss(redis: Redis) -> None:
    queue = clean(redis)
    taken: list[str] = []

    def work() -> None:
        mine = FairQueue("q", connection=redis)
        while ids := mine.take(7, wait=1):
            taken.extend(ids)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(600):
        push(queue, name(number), lane=number % 4, tenant=str(number % 5), cost=number % 9 + 1)
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(map(name, range(600)))


def test_rqs_own_functions_see_what_waits(redis: Redis) -> None:
    queue = clean(redis)
    for lane in range(4):
        push(queue, f"job{lane}", lane=lane)
    assert queue.count == len(queue) == 4
    assert queue.job_ids == [f"job{lane}" for lane in range(4)]
    assert queue.get_job_ids(1, 2) == ["job1", "job2"]
    assert queue.get_job_ids(3) == ["job3"]
    assert [job.id for job in queue.jobs] == queue.job_ids
    assert queue.get_job_position("job2") == 2
    assert queue.get_job_position("nobody") is None
    assert queue.fetch_job("job1") is not None
    redis.delete(Job.key_for("job3"))
    assert queue.fetch_job("job3") is None
    assert queue.job_ids == ["job0", "job1", "job2"]
    redis.delete(Job.key_for("job2"))
    queue.compact()
    assert queue.job_ids == ["job0", "job1"]
    assert queue.pop_job_id() == "job0"
    assert redis.llen(queue.intermediate_queue_key) == 0
    assert queue.empty() == 1
    assert not redis.exists(Job.key_for("job1"))
    assert queue.is_empty()
    push(queue, "last")
    queue.delete()
    assert Queue.all(connection=redis) == []
    assert not redis.exists(Job.key_for("last"))


def test_rqs_own_worker_drains_it(redis: Redis) -> None:
    queue = clean(redis)
    for number in range(3):
        given = fair.options(f"j{number}", RULES, inline=False, tenant="A", tokens=1, size=0)
        queue.enqueue("os.getpid", **given | {"result_ttl": 60})
    worker = SimpleWorker([queue], connection=redis, queue_class=FairQueue, serializer=JSONSerializer)
    assert worker.work(burst=True)
    assert queue.finished_job_registry.count == 3
    assert redis.hget(Job.key_for("j0"), "takes") == b"1"


def test_options_say_every_lifetime(redis: Redis) -> None:
    queue = clean(redis)
    given = fair.options("i" * 32, RULES, inline=True, tenant="A", tokens=0, size=7, stage="judge")
    job = queue.enqueue(VERIFY_JOB, "i" * 32, **given)
    assert job.id == "i" * 32 + "-j"
    assert (job.timeout, job.ttl, job.result_ttl, job.failure_ttl) == (300, 3600, 0, RULES.verdict_ttl)
    assert job.meta == {"lane": 1, "tenant": "A", "tokens": 1, "size": 7, "stage": "judge"}
    assert 0 < redis.ttl(job.key) <= 3600
    assert queue.waiting() == {"first": 0, "inline-judge": 1, "inline": 0, "async-judge": 0, "async": 0}


def test_in_a_transaction_it_is_queued_when_that_is_executed(redis: Redis) -> None:
    queue = clean(redis)
    with redis.pipeline() as pipeline:
        given = fair.options("id", RULES, inline=False, tenant="A", tokens=1, size=0)
        queue.enqueue(VERIFY_JOB, "id", pipeline=pipeline, **given)
        assert queue.count == 0
        pipeline.execute()
    assert queue.take(1) == ["id"]


def test_a_take_does_not_get_slower_with_the_queue(redis: Redis) -> None:
    queue = clean(redis)

    def spent() -> float:
        """Seconds of CPU, which other work on the machine does not change."""
        cpu: Any = redis.info("cpu")
        return float(cpu["used_cpu_user_main_thread"]) + float(cpu["used_cpu_sys_main_thread"])

    def seconds() -> float:
        before = spent()
        assert len(queue.take(200)) == 200
        return spent() - before

    def fill(start: int, stop: int) -> None:
        for first in range(start, stop, 500):
            with redis.pipeline() as pipeline:
                for number in range(first, first + 500):
                    given = fair.options(name(number), RULES, inline=False, tenant=f"t{number % 50}", tokens=9, size=0)
                    queue.enqueue(VERIFY_JOB, name(number), pipeline=pipeline, **given)
                pipeline.execute()

    fill(0, 1000)
    few = min(seconds() for _ in range(4))
    fill(1000, 12_000)
    many = min(seconds() for _ in range(4))
    assert many < 5 * few + 0.02


@pytest.mark.parametrize("meta", [b"\xff", b"[]", b'{"tokens": -5}', b'{"tokens": {}}', b'{"tokens": "many"}', b"{"])
def test_a_damaged_cost_is_one(redis: Redis, meta: bytes) -> None:
    queue = clean(redis)
    for id in ("a", "b"):
        push(queue, id, cost=5)
        redis.hset(Job.key_for(id), "meta", meta)
    assert queue.take(2, tokens=1) == ["a"]
    assert queue.take(2, tokens=1) == ["b"]
