"""Events from the outbox to receivers: signed, tried again, rested, switched off, kept and sent anew."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from redis import Redis
from rq.job import Job

from policies.errors import SettingsError
from policies.settings import Settings
from policies.verification import unverified
from tests.verifier_pool.receiver import Answer, Receiver, listening, status
from tests.verifier_pool.toy import settings
from verifier_pool import delivery, webhooks, worker
from verifier_pool.link import deliveries, delivery_log, endpoints, events
from verifier_pool.link.deliveries import UNQUEUED, Delivery
from verifier_pool.link.directory import Directory
from verifier_pool.link.endpoints import SETTINGS
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import OUTBOX, WEBHOOK_QUEUE, event_key, verdict_key
from verifier_pool.store import Store
from verifier_pool.webhooks import next_wait, pause, verify_signature

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ID = "a" * 32


def hooked(url: str, receiver: Receiver, retries: Sequence[int] = (0, 0), **more: Any) -> Settings:
    webhook = {"url": receiver.url, "secret": SECRET, "allow_private": True, "retries": list(retries)}
    return settings(url, webhook=webhook, **more)


def run(redis: Redis, rules: Settings, *ids: str) -> FairQueue:
    """Settle, then deliver until nothing waits."""
    store = Store(redis, verdict_ttl=600, webhook=True)
    for id in ids:
        store.settle(unverified(id, "backlog", {"owner": "secret-owner"}, 1_700_000_000.25), None)
    worker.run_webhooks(rules, threading.Event(), burst=True)
    return FairQueue(WEBHOOK_QUEUE, connection=redis)


def deliver(redis: Redis, url: str, *answers: Answer, retries: Sequence[int] = (0, 0)) -> tuple[Receiver, FairQueue]:
    with listening(Receiver(*answers)) as receiver:
        return receiver, run(redis, hooked(url, receiver, retries), ID)


def log(redis: Redis) -> list[Delivery]:
    return delivery_log.log(redis, SETTINGS)


def state(redis: Redis, rules: Settings) -> dict[str, Any]:
    endpoint = endpoints.of_settings(rules)
    assert endpoint is not None
    return delivery_log.state(redis, endpoint)


def test_a_verdict_arrives_signed_and_without_its_owner(redis: Redis, valkey_url: str) -> None:
    receiver, queue = deliver(redis, valkey_url, status(200))
    ((headers, body),) = receiver.requests
    assert verify_signature(SECRET, headers, body, time.time())
    message = orjson.loads(body)
    assert (message["type"], message["timestamp"]) == ("verification.completed", "2023-11-14T22:13:20.250+00:00")
    assert (message["data"]["id"], message["sequence"]) == (ID, 1)
    assert b"secret-owner" not in body
    assert headers["webhook-id"] == f"msg_{ID}"
    assert headers["content-type"] == "application/json"
    assert (redis.zcard(OUTBOX), len(queue.failed_job_registry)) == (0, 0)
    (kept,) = log(redis)
    assert (kept.status, kept.tries, kept.attempts[0]["status"]) == ("delivered", 1, 200)
    assert not redis.exists(Job.key_for(f"webhook-{kept.id}"))


def test_every_try_has_the_same_id_and_bytes(redis: Redis, valkey_url: str) -> None:
    receiver, queue = deliver(redis, valkey_url, status(500), status(302, location="/"), status(204))
    assert len(receiver.requests) == 3
    assert len({body for _, body in receiver.requests}) == 1
    assert {headers["webhook-id"] for headers, _ in receiver.requests} == {f"msg_{ID}"}
    assert all(verify_signature(SECRET, headers, body, time.time()) for headers, body in receiver.requests)
    assert len(queue.failed_job_registry) == 0
    assert [each["status"] for each in log(redis)[0].attempts] == [500, 302, 204]


def test_numbers_count_what_one_webhook_is_told(redis: Redis, valkey_url: str) -> None:
    with listening(Receiver(status(200))) as receiver:
        rules = hooked(valkey_url, receiver)
        run(redis, rules, ID, "b" * 32)
        run(redis, rules, "c" * 32)
    assert sorted(orjson.loads(body)["sequence"] for _, body in receiver.requests) == [1, 2, 3]


@pytest.mark.parametrize(
    ("taken", "word", "type"),
    [
        ([], "reject", "rejected"),
        ([], "pass", "completed"),
        ([], "withheld", "completed"),
        (["verification.completed"], "reject", "completed"),
        (["verification.rejected"], "reject", "rejected"),
        (["verification.rejected"], "pass", None),
        (["backend.suspect"], "reject", None),
    ],
)
def test_a_verdict_is_one_event_for_a_webhook(taken: list[str], word: str, type: str | None) -> None:
    verification = unverified(ID, "x", {"owner": "secret-owner"}, 5.5) | {"verdict": word}
    happened = events.of_verdict(verification)
    subscription = endpoints.Endpoint(id="x", url="", wanted={"events": taken}).subscription
    found = happened.type_for(subscription)
    assert found == (type and f"verification.{type}")
    parts = happened.body("t")
    assert parts == events.of_verdict(orjson.loads(orjson.dumps(verification))).body("t")
    assert b"secret-owner" not in b"7".join(parts)
    assert list(orjson.loads(b"7".join(parts))) == ["type", "timestamp", "sequence", "data"]


def test_what_expired_before_anybody_was_told_is_counted(redis: Redis, valkey_url: str) -> None:
    with listening(Receiver(status(200))) as receiver:
        for id in (ID, "event:" + ID):
            redis.zadd(OUTBOX, {id: 1})
        run(redis, hooked(valkey_url, receiver))
    assert (redis.zcard(OUTBOX), receiver.requests, log(redis)) == (0, [], [])


def test_after_the_last_try_it_is_a_dead_letter_and_can_be_sent_again(redis: Redis, valkey_url: str) -> None:
    receiver, queue = deliver(redis, valkey_url, status(503))
    assert len(receiver.requests) == 3
    assert queue.failed_job_registry.get_job_ids() == ["webhook-settings-1"]
    assert log(redis)[0].status == "failed"
    with listening(Receiver(status(200))) as later:
        rules = hooked(valkey_url, later)
        redis.hdel(deliveries.state_key(SETTINGS), "paused")
        assert deliveries.again(redis, rules.deliveries, (), "settings-1") is None
        assert "not over" in str(deliveries.again(redis, rules.deliveries, (), "settings-1"))
        queue = run(redis, rules)
    assert [body for _, body in later.requests] == [receiver.requests[0][1]]
    assert later.requests[0][0]["webhook-id"] == receiver.requests[0][0]["webhook-id"]
    assert len(queue.failed_job_registry) == 0
    assert len(log(redis)[0].attempts) == 4
    assert "expired" in str(deliveries.again(redis, rules.deliveries, (), "settings-7"))
    assert "no such" in str(deliveries.again(redis, rules.deliveries, (), "settings"))


def test_410_switches_the_receiver_off(redis: Redis, valkey_url: str) -> None:
    with listening(Receiver(status(410))) as receiver:
        rules = hooked(valkey_url, receiver)
        queue = run(redis, rules, ID, "b" * 32)
        assert len(receiver.requests) == 1
        assert len(queue.failed_job_registry) == 2
        assert state(redis, rules)["disabled_reason"] == "gone"
        moved = Receiver()
        moved.url = "https://elsewhere.test/"
        elsewhere = hooked(valkey_url, moved)
        assert not state(redis, elsewhere)["disabled"]
        assert delivery_log.resume(redis, SETTINGS)
        run(redis, rules, "c" * 32)
        assert len(receiver.requests) == 2


def test_waits_follow_the_schedule_with_bounded_jitter() -> None:
    assert [next_wait((5, 300), attempt, None, 0.0) for attempt in (0, 1)] == [5, 300]
    assert next_wait((5, 300), 1, None, 0.999) <= 330
    assert next_wait((5, 300), 0, 42.0, 0.0) == 42
    assert next_wait((5, 300), 1, 42.0, 0.0) == 300
    assert next_wait((5,), 0, 1e12, 0.0) == webhooks.MAX_RETRY_AFTER


def test_a_webhook_that_fails_rests_as_long_as_a_delivery_would() -> None:
    failed, busy = delivery.Outcome(500), delivery.Outcome(429, retry_after=50.0)
    assert [pause((5, 30, 86_400), failures, failed, 0.0) for failures in (0, 1, 2, 9)] == [5, 30, 3600, 3600]
    assert [pause((5, 100), failures, busy, 0.0) for failures in (0, 1)] == [50, 100]
    assert pause((), 3, failed, 0.5) == 0


def test_retry_after_is_obeyed(redis: Redis, valkey_url: str) -> None:
    _, queue = deliver(redis, valkey_url, status(429, retry_after="77"))
    (job_id,) = queue.scheduled_job_registry.get_job_ids()
    due = queue.scheduled_job_registry.get_scheduled_time(job_id).timestamp()
    assert 70 < due - log(redis)[0].attempts[0]["at"] < 80
    assert log(redis)[0].status == "retrying"


class Days:
    """A clock that the test turns, with jobs that wait becoming due."""

    def __init__(self, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.time()
        self._redis = redis
        monkeypatch.setattr(webhooks, "clock", lambda: self.now)

    def skip(self, queue: FairQueue) -> float:
        """Until the next try; returns how long that was."""
        registry = queue.scheduled_job_registry
        (job,) = registry.get_job_ids()
        self._redis.zadd(registry.key, {job: 0})
        wait = (log(self._redis)[0].next or 0.0) - self.now
        self.now += wait + 1
        return wait


def test_a_receiver_that_is_down_for_days(redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    days = Days(redis, monkeypatch)
    with listening(Receiver(status(503))) as receiver:
        rules = hooked(valkey_url, receiver, webhooks.retries_of(settings(valkey_url), "x"))
        queue, waits = run(redis, rules, ID), list[float]()
        while len(queue.scheduled_job_registry):
            waits.append(days.skip(queue))
            run(redis, rules)
        schedule = rules.deliveries.retries
        assert len(receiver.requests) == len(schedule) + 1
        assert all(least - 1 <= wait <= 1.1 * least + 1 for least, wait in zip(schedule, waits, strict=True))
        assert 2 * 86_400 < sum(waits) < 4 * 86_400
        assert len({body for _, body in receiver.requests}) == 1
        assert len(queue.failed_job_registry) == 1
        receiver.answers = [status(200)]
        days.now += webhooks.MAX_PAUSE * 1.1
        assert deliveries.again(redis, rules.deliveries, schedule, "settings-1") is None
        run(redis, rules)
    assert log(redis)[0].status == "delivered"
    assert state(redis, rules)["failures"] == 0


def test_others_wait_while_their_webhook_rests(redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    days = Days(redis, monkeypatch)
    with listening(Receiver(status(500), status(200))) as receiver:
        rules = hooked(valkey_url, receiver, (60, 60))
        queue = run(redis, rules, ID)
        run(redis, rules, "b" * 32, "c" * 32)
        assert len(receiver.requests) == 1
        assert {each.tries for each in log(redis)} == {0, 1}
        days.now += 200
        for job in queue.scheduled_job_registry.get_job_ids():
            redis.zadd(queue.scheduled_job_registry.key, {job: 0})
        run(redis, rules)
    assert {each.status for each in log(redis)} == {"delivered"}


def test_one_that_fails_for_too_long_is_switched_off(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = Days(redis, monkeypatch)
    with listening(Receiver(status(500))) as receiver:
        rules = hooked(valkey_url, receiver, ())
        run(redis, rules, ID)
        assert not state(redis, rules)["disabled"]
        days.now += rules.deliveries.disable_after + 1
        run(redis, rules, "b" * 32)
        assert state(redis, rules)["disabled_reason"] == "failing"


def test_what_waits_for_too_long_is_given_up(redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    days = Days(redis, monkeypatch)
    with listening(Receiver(status(429, retry_after="20000"))) as receiver:
        rules = hooked(valkey_url, receiver, (1,))
        queue = run(redis, rules, ID)
        run(redis, rules, "b" * 32)
        days.now += deliveries.lifetime((1,))
        redis.hset(deliveries.state_key(SETTINGS), "paused", str(days.now + 100))
        for job in queue.scheduled_job_registry.get_job_ids():
            redis.zadd(queue.scheduled_job_registry.key, {job: 0})
        run(redis, rules)
    assert len(receiver.requests) == 1
    assert {each.status for each in log(redis)} == {"failed"}


def test_what_is_too_much_for_a_webhook_is_dropped_and_leaves_a_gap(redis: Redis, valkey_url: str) -> None:
    with listening(Receiver(status(200))) as receiver:
        rules = hooked(valkey_url, receiver, deliveries={"waiting": 2})
        ids = [f"{n:032x}" for n in range(4)]
        run(redis, rules, *ids)
        run(redis, rules, ID)
    assert sorted(orjson.loads(body)["sequence"] for _, body in receiver.requests) == [1, 2, 5]
    assert state(redis, rules)["dropped"] == 2


def test_what_is_dropped_for_the_only_webhook_is_counted_too(redis: Redis, valkey_url: str) -> None:
    rules = settings(valkey_url, webhook={"url": "https://x.test/", "secret": SECRET}).deliveries
    endpoint = endpoints.Endpoint(id=SETTINGS, url="https://x.test/")
    happened = events.Happened(ID, "", "", 5.5, {}, "t")
    one = rules.model_copy(update={"waiting": 1})
    made = [deliveries.plan(redis, one, (), happened, [(endpoint, "t")]) for _ in range(2)]
    assert made == [(["settings-1"], 0), ([], 1)]


def test_the_log_is_bounded_and_expires(redis: Redis, valkey_url: str) -> None:
    with listening(Receiver(status(200))) as receiver:
        rules = hooked(valkey_url, receiver, deliveries={"log": 3, "log_ttl": 100})
        run(redis, rules, *[f"{n:032x}" for n in range(6)])
    assert [each.number for each in log(redis)] == [6, 5, 4]
    keys = [*redis.keys(deliveries.delivery_key("*")), deliveries.over_key(SETTINGS)]
    assert len(keys) == 4
    assert all(0 < redis.ttl(key) <= 100 for key in keys)
    assert [each.number for each in delivery_log.log(redis, SETTINGS, limit=1, before=6)] == [5]
    assert delivery_log.log(redis, SETTINGS, status="failed") == []


def test_an_event_is_planned_once_whoever_dies_in_between(redis: Redis, valkey_url: str) -> None:
    store = Store(redis, verdict_ttl=600, webhook=True)
    rules = settings(valkey_url, webhook={"url": "https://x.test/", "secret": SECRET})
    store.settle(unverified(ID, "backlog", None, 5.5), None)
    happened = webhooks._happened(store, rules, ID)
    endpoint = endpoints.of_settings(rules)
    assert happened is not None
    assert endpoint is not None
    made = [deliveries.plan(redis, rules.deliveries, (), happened, [(endpoint, "t")], ID) for _ in range(2)]
    assert [each.ids for each in made] == [["settings-1"], []]
    assert redis.zrange(UNQUEUED, 0, -1) == [b"settings-1"]
    # Killed here: the next process queues it.
    webhooks.drain_outbox(store, rules, Directory(redis))
    assert (redis.zcard(UNQUEUED), FairQueue(WEBHOOK_QUEUE, connection=redis).get_job_ids()) == (
        0,
        ["webhook-settings-1"],
    )


def test_a_job_of_an_earlier_release_is_told_anew(redis: Redis, valkey_url: str) -> None:
    with listening(Receiver(status(200))) as receiver:
        rules = hooked(valkey_url, receiver)
        queue = FairQueue(WEBHOOK_QUEUE, connection=redis)
        Store(redis, verdict_ttl=600).settle(unverified(ID, "backlog", None, 5.5), None)
        queue.enqueue("verifier_pool.webhooks.deliver", ID, job_id=f"webhook-{ID}")
        queue.enqueue("verifier_pool.webhooks.deliver", "we_x-5", job_id="webhook-we_x-5")
        run(redis, rules)
        run(redis, rules)
    assert len(receiver.requests) == 1


def test_what_expired_takes_nobodys_place(redis: Redis, valkey_url: str) -> None:
    with listening(Receiver(status(200))) as receiver:
        rules = hooked(valkey_url, receiver, deliveries={"waiting": 2})
        store = Store(redis, verdict_ttl=600, webhook=True)
        for number in range(2):
            store.settle(unverified(f"{number:032x}", "backlog", None, 5.5), None)
        webhooks.drain_outbox(store, rules, Directory(redis))
        lost = deliveries.find(redis, "settings-1")
        assert lost is not None
        # As after an outage of every sender that is longer than deliveries are kept.
        redis.delete(*redis.keys(deliveries.delivery_key("*")))
        assert deliveries.begin(redis, lost, receiver.url, 1, 0.0)[0] == "gone"
        assert redis.zrange(deliveries.waiting_key(SETTINGS), 0, -1) == [b"settings-2"]
        run(redis, rules)
        assert not redis.exists(deliveries.waiting_key(SETTINGS))
        run(redis, rules, *[f"{number:032x}" for number in (8, 9)])
    assert sorted(orjson.loads(body)["sequence"] for _, body in receiver.requests) == [3, 4]
    assert state(redis, rules)["dropped"] == 0


@pytest.mark.parametrize(
    ("webhook", "key"),
    [
        ({"url": "https://x.test/", "secret": "hunter2"}, r"webhook\.secret"),
        ({"url": "http://x.test/", "secret": SECRET}, r"webhook\.url"),
    ],
)
def test_bad_settings_stop_the_start(webhook: dict[str, str], key: str) -> None:
    with pytest.raises(SettingsError, match=key) as caught:
        webhooks.check_settings(settings("redis://x", webhook=webhook).webhook)
    assert "hunter2" not in str(caught.value)


def test_an_event_of_a_backend_is_told(redis: Redis, valkey_url: str) -> None:
    redis.set(event_key(ID), events.stored("backend.suspect", 5.0, {"backend": "honest"}))
    redis.zadd(OUTBOX, {f"event:{ID}": 5})
    with listening(Receiver(status(200))) as receiver:
        run(redis, hooked(valkey_url, receiver))
    (said,) = [orjson.loads(body) for _, body in receiver.requests]
    assert (said["type"], said["data"]["backend"]) == ("backend.suspect", "honest")
    assert said["timestamp"] == "1970-01-01T00:00:05.000+00:00"


@pytest.mark.parametrize("stored", [b"", b"[]", b"{}", b'{"id": 1, "model": "m", "decided": "x"}', b"\xff"])
def test_what_is_no_verdict_holds_nothing_up(redis: Redis, valkey_url: str, stored: bytes) -> None:
    redis.set(verdict_key(ID), stored)
    redis.zadd(OUTBOX, {ID: 1})
    with listening(Receiver(status(200))) as receiver:
        run(redis, hooked(valkey_url, receiver), "b" * 32)
    assert [orjson.loads(body)["data"]["id"] for _, body in receiver.requests] == ["b" * 32]
    assert redis.zcard(OUTBOX) == 0
