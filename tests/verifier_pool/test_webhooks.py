from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import orjson
import pytest
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from policies.errors import SettingsError
from policies.settings import Settings
from policies.verification import unverified
from tests.support.waiting import PATIENCE
from tests.verifier_pool import rig
from tests.verifier_pool.receiver import Answer, Receiver, listening, status
from tests.verifier_pool.toy import answer, settings
from verifier_pool import RQ_PREFIX, webhooks, worker
from verifier_pool.link import events
from verifier_pool.link.queue import OUTBOX, WEBHOOK_QUEUE, disabled_key
from verifier_pool.store import Store
from verifier_pool.webhooks import next_wait, verify_signature

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ID = "a" * 32


def hooked(url: str, receiver: Receiver, retries: Sequence[int] = (0, 0)) -> Settings:
    webhook = {"url": receiver.url, "secret": SECRET, "allow_private": True, "retries": list(retries)}
    return settings(url, webhook=webhook)


def run(redis: Redis, rules: Settings, *ids: str) -> Queue:
    """Settle, then deliver until nothing waits."""
    store = Store(redis, verdict_ttl=600, webhook=True)
    for id in ids:
        store.settle(unverified(id, "backlog", {"owner": "secret-owner"}, 1_700_000_000.25), None)
    worker.run_webhooks(rules, threading.Event(), burst=True)
    return Queue(WEBHOOK_QUEUE, connection=redis, serializer=JSONSerializer)


def deliver(redis: Redis, url: str, *answers: Answer, retries: Sequence[int] = (0, 0)) -> tuple[Receiver, Queue]:
    with listening(Receiver(*answers)) as receiver:
        return receiver, run(redis, hooked(url, receiver, retries), ID)


def test_a_verdict_arrives_signed_and_without_its_owner(redis: Redis, valkey_url: str) -> None:
    receiver, queue = deliver(redis, valkey_url, status(200))
    ((headers, body),) = receiver.requests
    assert verify_signature(SECRET, headers, body, time.time())
    message = orjson.loads(body)
    assert (message["type"], message["timestamp"]) == ("verification.completed", "2023-11-14T22:13:20.250+00:00")
    assert message["data"]["id"] == ID
    assert b"secret-owner" not in body
    assert headers["webhook-id"] == f"msg_{ID}"
    assert headers["content-type"] == "application/json"
    assert (redis.zcard(OUTBOX), len(queue.failed_job_registry)) == (0, 0)


def test_every_try_has_the_same_id_and_bytes(redis: Redis, valkey_url: str) -> None:
    receiver, queue = deliver(redis, valkey_url, status(500), status(302, location="/"), status(204))
    assert len(receiver.requests) == 3
    assert len({body for _, body in receiver.requests}) == 1
    assert {headers["webhook-id"] for headers, _ in receiver.requests} == {f"msg_{ID}"}
    assert all(verify_signature(SECRET, headers, body, time.time()) for headers, body in receiver.requests)
    assert len(queue.failed_job_registry) == 0


@pytest.mark.parametrize(("word", "type"), [("reject", "rejected"), ("pass", "completed"), ("withheld", "completed")])
def test_a_reject_is_an_event_of_its_own(word: str, type: str) -> None:
    verification = unverified(ID, "x", {"owner": "secret-owner"}, 5.5) | {"verdict": word}
    body = events.of_verdict(verification)
    assert body == events.of_verdict(orjson.loads(orjson.dumps(verification)))
    assert orjson.loads(body)["type"] == f"verification.{type}"
    assert b"secret-owner" not in body


@pytest.mark.parametrize("id", [ID, "event:" + ID])
def test_what_expired_is_a_dead_letter(redis: Redis, valkey_url: str, id: str) -> None:
    with listening(Receiver(status(200))) as receiver:
        redis.zadd(OUTBOX, {id: 1})
        queue = run(redis, hooked(valkey_url, receiver))
    assert queue.failed_job_registry.get_job_ids() == ["webhook-" + id.replace(":", "-")]
    assert receiver.requests == []


def test_after_the_last_try_it_is_a_dead_letter(redis: Redis, valkey_url: str) -> None:
    receiver, queue = deliver(redis, valkey_url, status(503))
    assert len(receiver.requests) == 3
    assert queue.failed_job_registry.get_job_ids() == [f"webhook-{ID}"]
    with listening(Receiver(status(200))) as again:
        queue.failed_job_registry.requeue(f"webhook-{ID}")
        run(redis, hooked(valkey_url, again))
        assert len(again.requests) == 1


def test_410_switches_the_receiver_off(redis: Redis, valkey_url: str) -> None:
    with listening(Receiver(status(410))) as receiver:
        rules = hooked(valkey_url, receiver)
        queue = run(redis, rules, ID, "b" * 32)
        assert len(receiver.requests) == 1
        assert set(queue.failed_job_registry.get_job_ids()) == {f"webhook-{ID}", f"webhook-{'b' * 32}"}
        redis.delete(disabled_key(receiver.url))
        run(redis, rules, "c" * 32)
        assert len(receiver.requests) == 2


def test_waits_follow_the_schedule_with_bounded_jitter() -> None:
    assert [next_wait((5, 300), attempt, None, 0.0) for attempt in (0, 1)] == [5, 300]
    assert next_wait((5, 300), 1, None, 0.999) <= 330
    assert next_wait((5, 300), 0, 42.0, 0.0) == 42
    assert next_wait((5, 300), 1, 42.0, 0.0) == 300
    assert next_wait((5,), 0, 1e12, 0.0) == webhooks.MAX_RETRY_AFTER


def test_retry_after_is_obeyed(redis: Redis, valkey_url: str) -> None:
    _, queue = deliver(redis, valkey_url, status(429, retry_after="77"))
    (job_id,) = queue.scheduled_job_registry.get_job_ids()
    due = queue.scheduled_job_registry.get_scheduled_time(job_id).timestamp()
    assert 70 < due - time.time() < 80


def test_a_verdict_handed_over_twice_is_queued_once(redis: Redis, valkey_url: str) -> None:
    store = Store(redis, verdict_ttl=600, webhook=True)
    rules = settings(valkey_url, webhook={"url": "https://x.test/", "secret": SECRET})
    for _ in range(2):
        redis.zadd(OUTBOX, {ID: 1})
        assert webhooks.drain_outbox(store, rules) == 1
    assert Queue(WEBHOOK_QUEUE, connection=redis, serializer=JSONSerializer).get_job_ids() == [f"webhook-{ID}"]


@pytest.mark.parametrize(
    ("webhook", "key"),
    [
        ({"url": "https://x.test/", "secret": "hunter2"}, "webhook.secret"),
        ({"url": "http://x.test/", "secret": SECRET}, "webhook.url"),
    ],
)
def test_bad_settings_stop_the_start(webhook: dict[str, str], key: str) -> None:
    with pytest.raises(SettingsError, match=key) as caught:
        webhooks.check_settings(settings("redis://x", webhook=webhook).webhook)
    assert "hunter2" not in str(caught.value)


def test_the_worker_brings_its_own_webhook_process(redis: Redis, valkey_url: str, tmp_path: object) -> None:
    config = f"{tmp_path}/countersign.yaml"
    with listening(Receiver(status(200))) as receiver:
        rules = hooked(valkey_url, receiver)
        tree = rules.model_dump(mode="json", exclude_defaults=True)
        tree["webhook"]["secret"] = SECRET
        with open(config, "wb") as file:
            file.write(orjson.dumps(tree))
        code = "import sys; from verifier_pool.worker import main; sys.exit(main(sys.argv[1:]))"
        process = rig.start(code, "--config", config)
        try:
            id = rig.submit(redis, rules, [answer()])
            rig.wait_until(lambda: receiver.requests)
            assert orjson.loads(receiver.requests[0][1])["data"]["id"] == id
            assert redis.scard(RQ_PREFIX + ":workers") == 2
        finally:
            process.terminate()
            assert process.wait(PATIENCE) == 0
        assert redis.scard(RQ_PREFIX + ":workers") == 0
