"""Queues, profiles, the webhook, keys and the audit log over the admin API."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import orjson
import pytest
from rq.serializers import JSONSerializer

from tests.proxy.admin.conftest import BOSS, KEYS, House, eventually
from verifier_pool.link import deliveries, orders, running, trail
from verifier_pool.link.fair import FairQueue
from verifier_pool.link.queue import VERIFY_JOB, VERIFY_QUEUE, queue_of

HOOK = {
    "url": "https://us3r:pa55@example.com:8443/secret-path?token=query",
    "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
}


def test_queues_are_shown_with_what_failed(house: House) -> None:
    assert house.get("/admin/queues") == {"object": "list", "data": [], "dead": []}
    queue = FairQueue(VERIFY_QUEUE, connection=house.redis, serializer=JSONSerializer)
    queue.enqueue(VERIFY_JOB, "a" * 32, job_id="a" * 32)
    (shown,) = house.get("/admin/queues")["data"]
    assert (shown["queue"], shown["waiting"], shown["in_flight"], shown["dead"]) == (VERIFY_QUEUE, 1, 0, 0)
    assert shown["oldest_seconds"] >= 0
    assert shown["model"] is None
    other = FairQueue(queue_of("m"), connection=house.redis, serializer=JSONSerializer)
    other.enqueue(VERIFY_JOB, "b" * 32, job_id="b" * 32)
    assert {each["model"] for each in house.get("/admin/queues")["data"]} == {"m", None}


def test_what_workers_are_asked_is_done_by_one_and_answered(house: House) -> None:
    done: list[orders.Order] = []
    over = threading.Event()

    def do(order: orders.Order) -> list[dict[str, object]]:
        done.append(order)
        return [{"job": id, "id": id, "done": True, "why": None} for id in order.ids or ()]

    def work() -> None:
        while not over.wait(0.02):
            orders.carry_out(house.redis, do)

    thread = threading.Thread(target=work)
    thread.start()
    answer = house.admin.post("/admin/queues/requeue", json={"ids": ["x"]})
    over.set()
    thread.join()
    assert (answer.status_code, answer.json()["status"]) == (200, "done")
    assert answer.json()["data"] == [{"job": "x", "id": "x", "done": True, "why": None}]
    assert [(each.action, each.ids, each.by) for each in done] == [("requeue", ("x",), "key:boss")]


def test_where_no_worker_runs_it_says_so(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifier_pool.link.orders.PATIENCE", 0.0)
    answer = house.admin.post("/admin/queues/drop", json={"all": True})
    assert (answer.status_code, answer.json()["status"]) == (202, "waiting")
    assert 0 < house.redis.ttl(orders.ORDERS) <= 300
    for body in ({}, {"ids": ["x"], "all": True}, {"ids": "x"}, {"other": 1}):
        assert house.admin.post("/admin/queues/drop", json=body).status_code == 400


def test_who_waits_for_workers_is_in_nobodys_way(house: House) -> None:
    """More wait than there are threads, until a drain that came after them all is done."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        url = f"{house.proxy.admin_url}/admin/queues/requeue"
        answers.append(httpx.post(url, json={"all": True}, headers=BOSS, timeout=60))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for each in threads:
        each.start()
    eventually(lambda: house.redis.llen(orders.ORDERS) == 6)
    assert house.admin.post("/admin/backends/b1/drain").json()["drained"]
    assert answers == []
    assert orders.carry_out(house.redis, lambda order: []) == 6
    for each in threads:
        each.join()
    assert [each.json()["status"] for each in answers] == ["done"] * 6


def test_profiles_are_what_workers_say(house: House) -> None:
    facts = {
        "name": "0123456789abcdef",
        "key": {"model": "m", "runtime": "vllm-0.32-v2", "precision": "bf16", "engine": "", "reference": "r"},
        "lacks": ["routing"],
    }
    for _ in range(2):
        running.tell(house.redis, msgspec.structs.replace(running.begun("worker", "verify"), profiles={"m": facts}))
    (found,) = house.get("/admin/profiles")["data"]
    assert found["lacks"] == ["a profile"]
    house.change(models={"m": {"vocab_size": 1000, "profile": "m.json"}})
    eventually(lambda: house.proxy.services.settings.models["m"].profile)
    one = house.get("/admin/profiles/m")
    assert (one["workers"], one["differ"], one["lacks"], one["profile"]["name"]) == (
        2,
        False,
        ["routing"],
        facts["name"],
    )
    assert one["unfit"] == {"b1": "precision is '', the profile was measured with 'bf16'"}
    assert house.admin.get("/admin/profiles/none").status_code == 404


def test_the_webhook_is_shown_tried_and_resumed(open_house: Callable[..., House]) -> None:
    house = open_house(webhook=HOOK)
    (shown,) = house.get("/admin/webhooks")["data"]
    assert (shown["url"], shown["disabled"], shown["failures"]) == ("https://example.com:8443", False, 0)
    tried = house.admin.post("/admin/webhooks/test?wait=0")
    assert (tried.status_code, tried.json()["status"]) == (202, "waiting")
    assert house.redis.zrange(deliveries.UNQUEUED, 0, -1) == [tried.json()["delivery"].encode()]
    assert house.admin.post("/admin/webhooks/resume").status_code == 409
    off: dict[Any, Any] = {"disabled": "gone", "disabled_url": HOOK["url"]}
    house.redis.hset(deliveries.state_key("settings"), mapping=off)
    assert house.get("/admin/webhooks")["data"][0]["disabled"]
    assert house.admin.post("/admin/webhooks/test").status_code == 409
    assert not house.admin.post("/admin/webhooks/resume").json()["disabled"]
    assert house.get("/admin/webhooks/failures")["data"] == []
    actions = [each["action"] for each in house.audit(action="webhook.")]
    assert actions == ["webhook.resume", "webhook.test"]
    told = orjson.dumps([house.get("/admin/webhooks"), house.audit()])
    assert not [secret for secret in (b"whsec", b"secret-path", b"us3r", b"pa55", b"query") if secret in told]


def test_without_a_webhook_there_is_none_to_try(house: House) -> None:
    assert house.get("/admin/webhooks")["data"] == []
    assert house.admin.post("/admin/webhooks/test").json()["error"]["code"] == "conflict"


def test_client_keys_are_made_and_revoked_here(house: House) -> None:
    made = house.admin.post("/admin/keys", json={"name": "app", "limits": {"concurrency": 3}})
    assert made.status_code == 201
    text = made.json()["key"]
    ann = {"authorization": f"Bearer {text}"}
    assert house.http.get("/v1/models", headers=ann).status_code == 200
    assert house.chat().status_code == 401
    assert [key["name"] for key in house.get("/admin/keys")["data"]] == ["app"]
    limited = house.admin.patch("/admin/keys/app", json={"limits": {"requests_per_minute": 1}})
    assert limited.json()["limits"] == {"requests_per_minute": 1, "every": "month"}
    assert house.get("/admin/keys/app")["applies"]["requests_per_minute"] == 1
    assert house.admin.patch("/admin/keys/app", json={"limits": {"requests_per_minute": -1}}).status_code == 400
    assert house.admin.patch("/admin/keys/none", json={"limits": None}).status_code == 404
    assert house.admin.delete("/admin/keys/app").json()["state"] == "revoked"
    assert house.http.get("/v1/models", headers=ann).status_code == 401
    entries = house.audit(target="app")
    assert [each["action"] for each in entries] == ["key.revoke", "key.limit", "key.create"]
    assert entries[1]["before"]["limits"] == {"concurrency": 3, "every": "month"}
    assert {each["actor"] for each in entries} == {"key:boss"}
    assert text.partition("_")[2] not in orjson.dumps(entries).decode()


def test_the_audit_log_is_bounded_ordered_and_searched(open_house: Callable[..., House]) -> None:
    house = open_house(admin={"port": 0, "keys": KEYS, "audit_entries": 7})
    for n in range(10):
        house.admin.patch("/admin/backends/b1", json={"max_concurrency": n})
    assert house.redis.xlen(trail.TRAIL) == 7
    page = house.admin.get("/admin/audit", params={"limit": 3}).json()
    assert [each["after"] for each in page["data"]] == [{"max_concurrency": n} for n in (9, 8, 7)]
    assert page["has_more"]
    older = house.admin.get("/admin/audit", params={"before": page["data"][-1]["id"], "limit": 100}).json()
    assert ([each["after"]["max_concurrency"] for each in older["data"]], older["has_more"]) == ([6, 5, 4, 3], False)
    assert house.audit(actor="key:boss", action="backend.change", target="b1")
    assert house.audit(actor="cli:") == []
    for wrong in ({"limit": 0}, {"limit": 10_000}, {"before": "x; DROP"}):
        assert house.admin.get("/admin/audit", params=wrong).status_code in (400, 422)


def test_whoever_does_it_the_log_line_is_the_proxys(house: House, caplog: pytest.LogCaptureFixture) -> None:
    said = trail.entry("cli:ann@desk", "backend.drain", "b1", after={"api_key": "sk-secret", "drained": True})
    trail.append(house.redis, 100, said)
    house.admin.post("/admin/backends/b1/drain")
    lines = [each.__dict__["audit"] for each in caplog.records if hasattr(each, "audit")]
    assert [(each["actor"], each["action"]) for each in lines] == [
        ("cli:ann@desk", "backend.drain"),
        ("key:boss", "backend.drain"),
    ]
    assert lines[0]["after"] == {"api_key": "(secret)", "drained": True}
