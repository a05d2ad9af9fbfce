"""Webhooks over the API: a key has its own, admins see all, and what is registered is told by a real sender."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import httpx
import orjson
import pytest

from policies.settings import Settings, hash_key
from policies.signature import verify_signature
from policies.subscription import Subscription
from policies.verification import unverified
from tests.proxy.conftest import Rig
from tests.verifier_pool.receiver import Receiver, listening, status
from verifier_pool import worker
from verifier_pool.link import deliveries, events, receivers
from verifier_pool.link.endpoints import Endpoint, _decoder
from verifier_pool.link.queue import ENDPOINTS, OUTBOX, event_key
from verifier_pool.store import Store

KEYS = [
    {"name": "root", "sha256": hash_key("sk-root"), "admin": True},
    {"name": "ann", "sha256": hash_key("sk-ann")},
    {"name": "bob", "sha256": hash_key("sk-bob")},
]
LOCAL = {"networks": ["127.0.0.0/8"], "ports": [], "retries": [0, 0], "endpoints": 3}


@dataclass
class Desk:
    """A proxy with keys, and a sender that may reach this machine."""

    rig: Rig
    settings: Settings

    def ask(self, key: str, method: str, path: str = "", **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer sk-{key}"}
        return self.rig.http.request(method, f"/v1/webhooks{path}", headers=headers, **more)

    def register(self, key: str, url: str, **fields: Any) -> dict[str, Any]:
        answer = self.ask(key, "POST", json={"url": url, **fields})
        assert answer.status_code == 201, answer.text
        return cast("dict[str, Any]", answer.json())

    def happen(self, id: str, key: str, verdict: str = "unverified", model: str = "m") -> None:
        """An answer to this key gets its verdict."""
        intent = {"owner": hash_key(f"sk-{key}"), "model": model, "backend": "b1"}
        verification = unverified(id, "backlog", intent, 5.5) | {"verdict": verdict}
        assert Store(self.rig.redis, verdict_ttl=600).settle(verification, None)

    def suspect(self) -> None:
        """Something happens to a backend."""
        self.rig.redis.set(event_key("e" * 32), events.stored("backend.suspect", 5.0, {"backend": "b1"}), ex=60)
        self.rig.redis.zadd(OUTBOX, {"event:" + "e" * 32: 5.0})

    def send(self) -> None:
        """Deliver until nothing waits."""
        worker.run_webhooks(self.settings, threading.Event(), burst=True)


@pytest.fixture
def desk(make_rig: Callable[..., Rig]) -> Desk:
    rig = make_rig(keys=KEYS, deliveries=LOCAL)
    rig.redis.flushdb()
    redis_url = rig.redis.connection_pool.connection_kwargs
    url = f"redis://127.0.0.1:{redis_url['port']}"
    return Desk(rig, rig.proxy.services.settings.model_copy(update={"redis_url": url}))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with listening(Receiver(status(200))) as found:
        yield found


def bodies(receiver: Receiver) -> list[dict[str, Any]]:
    return [orjson.loads(body) for _, body in receiver.requests]


def test_registered_tried_and_told(desk: Desk, receiver: Receiver) -> None:
    made = desk.register("ann", receiver.url, description="mine")
    assert made["secret"].startswith("whsec_")
    assert (made["test"]["status"], made["key"], made["sequence"]) == ("waiting", "ann", 0)
    desk.happen("a" * 32, "ann", "reject")
    desk.happen("b" * 32, "bob", "reject")
    desk.suspect()
    desk.send()
    assert sorted(each["type"] for each in bodies(receiver)) == ["verification.rejected", "webhook.test"]
    assert all(verify_signature(made["secret"], headers, body, 0) is False for headers, body in receiver.requests)
    for headers, body in receiver.requests:
        assert verify_signature(made["secret"], headers, body, float(headers["webhook-timestamp"]))
    assert sorted(each["sequence"] for each in bodies(receiver)) == [1, 2]
    shown = desk.ask("ann", "GET", f"/{made['id']}")
    assert "whsec" not in shown.text
    assert (shown.json()["sequence"], shown.json()["waiting"], shown.json()["failures"]) == (2, 0, 0)
    log = desk.ask("ann", "GET", f"/{made['id']}/deliveries").json()
    assert [(each["sequence"], each["status"], each["tries"]) for each in log["data"]] == [
        (2, "delivered", 1),
        (1, "delivered", 1),
    ]
    assert {attempt["status"] for each in log["data"] for attempt in each["attempts"]} == {200}
    assert desk.ask("ann", "GET", f"/{made['id']}/deliveries?limit=1&before=2").json()["data"][0]["sequence"] == 1


def test_a_key_sees_its_own_and_an_admin_all(desk: Desk) -> None:
    made = {name: desk.register(name, f"https://{name}.test/secret-path") for name in ("ann", "bob", "root")}
    listed = {name: desk.ask(name, "GET").json()["data"] for name in made}
    assert [each["key"] for each in listed["ann"]] == ["ann"]
    assert {each["key"] for each in listed["root"]} == {"ann", "bob", "root"}
    seen = {each["key"]: each["url"] for each in listed["root"]}
    assert seen == {"ann": "https://ann.test", "bob": "https://bob.test", "root": "https://root.test/secret-path"}
    other = made["bob"]["id"]
    tried = [
        desk.ask("ann", "GET", f"/{other}"),
        desk.ask("ann", "PATCH", f"/{other}", json={"description": "x"}),
        desk.ask("ann", "DELETE", f"/{other}"),
        desk.ask("ann", "GET", f"/{other}/deliveries"),
        desk.ask("ann", "POST", f"/{other}/test"),
        desk.ask("ann", "POST", f"/{other}/resume"),
        desk.ask("ann", "POST", f"/{other}/rotate", json={}),
        desk.ask("ann", "POST", f"/{other}/replay", json={"failed": True}),
        desk.ask("ann", "GET", "/settings"),
    ]
    unknown = desk.ask("ann", "GET", "/we_none").json()
    assert [(each.status_code, each.json()) for each in tried] == [(404, unknown)] * len(tried)
    assert desk.ask("root", "DELETE", f"/{other}").status_code == 200
    assert desk.ask("bob", "GET").json()["data"] == []
    assert desk.rig.http.get("/v1/webhooks").status_code == 401
    assert desk.rig.http.post("/v1/webhooks", json={"url": "https://x.test"}).status_code == 401


def test_filters_and_what_is_for_admins(desk: Desk, receiver: Receiver) -> None:
    refused = [
        desk.ask("ann", "POST", json={"url": receiver.url, "events": ["backend.suspect"]}),
        desk.ask("ann", "POST", json={"url": receiver.url, "everyone": True}),
    ]
    assert [each.status_code for each in refused] == [403, 403]
    desk.register("ann", f"{receiver.url}/ann", events=["verification.completed"], models=["m"], verdicts=["reject"])
    desk.register("root", f"{receiver.url}/root", everyone=True, events=["verification.completed", "backend.suspect"])
    desk.register("root", f"{receiver.url}/own")
    for number, (key, verdict, model) in enumerate(
        [("ann", "reject", "m"), ("ann", "pass", "m"), ("ann", "reject", "n"), ("bob", "pass", "m")]
    ):
        desk.happen(f"{number:032x}", key, verdict, model)
    desk.suspect()
    desk.send()
    told = [(each["type"], each["data"].get("id", "")[-1:]) for each in bodies(receiver)]
    assert sorted(each for each in told if each[0] != "webhook.test") == [
        ("backend.suspect", ""),
        ("backend.suspect", ""),
        *[("verification.completed", each) for each in "00123"],
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"url": "ftp://example.com/"}, "url"),
        ({"url": "https://10.0.0.1/"}, "url"),
        ({"url": "https://2130706433/"}, "url"),
        ({"url": "https://user:word@example.com/"}, "url"),
        ({"url": "https://x.test/", "events": ["verification.maybe"]}, "events"),
        ({"url": "https://x.test/", "verdicts": ["fine"]}, "verdicts"),
        ({"url": "https://x.test/", "description": "x" * 201}, "description"),
        ({"url": 5}, None),
        ({}, None),
        ({"url": "https://x.test/", "secret": "whsec_x"}, None),
    ],
)
def test_what_cannot_be_registered(desk: Desk, body: dict[str, Any], param: str | None) -> None:
    answer = desk.ask("ann", "POST", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not desk.rig.redis.exists(ENDPOINTS)


def test_a_key_may_have_so_many(desk: Desk) -> None:
    answers: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(desk.ask("ann", "POST", json={"url": "https://x.test/"}).status_code)
        )
        for _ in range(8)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert set(answers) <= {201, 409}
    assert len(desk.ask("ann", "GET").json()["data"]) == answers.count(201) <= 3
    while desk.ask("ann", "POST", json={"url": "https://x.test/"}).status_code == 201:
        pass
    assert len(desk.ask("ann", "GET").json()["data"]) == 3
    desk.register("root", "https://x.test/")


def test_what_others_take_is_not_read_for_a_key(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(10):
        desk.register("root", "https://x.test/")
    read, reads = Subscription.model_validate, list[Any]()

    def counting(found: Any) -> Subscription:
        reads.append(found)
        return read(found)

    monkeypatch.setattr(Subscription, "model_validate", counting)
    assert desk.ask("ann", "GET").json()["data"] == []
    desk.register("ann", "https://x.test/")
    assert len(desk.ask("ann", "GET").json()["data"]) == 1
    assert len(reads) < 10


def test_secrets_rotate_with_both_signing_meanwhile(desk: Desk, receiver: Receiver) -> None:
    made = desk.register("ann", receiver.url)
    path = f"/{made['id']}"
    second = desk.ask("ann", "POST", f"{path}/rotate", json={}).json()
    third = desk.ask("ann", "POST", f"{path}/rotate", json={"overlap": 0}).json()
    assert len({made["secret"], second["secret"], third["secret"]}) == 3
    assert (second["secrets"], third["secrets"]) == (2, 1)
    desk.happen("a" * 32, "ann")
    desk.send()
    ((headers, body), *_) = receiver.requests
    at = float(headers["webhook-timestamp"])
    assert [verify_signature(each["secret"], headers, body, at) for each in (made, second, third)] == [
        False,
        False,
        True,
    ]
    assert desk.ask("ann", "POST", f"{path}/rotate", json={"overlap": -1}).status_code == 400
    fourth = desk.ask("ann", "POST", f"{path}/rotate", json={"overlap": 1000}).json()
    desk.happen("b" * 32, "ann")
    desk.send()
    headers, body = receiver.requests[-1]
    at = float(headers["webhook-timestamp"])
    assert len(headers["webhook-signature"].split()) == 2
    assert all(verify_signature(each["secret"], headers, body, at) for each in (third, fourth))


def test_failures_are_kept_and_sent_again(desk: Desk, receiver: Receiver) -> None:
    receiver.answers = [status(200), status(500)]
    made = desk.register("ann", receiver.url)
    path = f"/{made['id']}"
    desk.send()
    desk.happen("a" * 32, "ann")
    desk.send()
    (failed,) = desk.ask("ann", "GET", f"{path}/deliveries?status=failed").json()["data"]
    assert (failed["about"], failed["tries"]) == ("a" * 32, 3)
    receiver.answers = [status(200)]
    (said,) = desk.ask("ann", "POST", f"{path}/replay", json={"failed": True}).json()["data"]
    assert (said["id"], said["done"]) == (failed["id"], True)
    desk.send()
    tried = [(headers["webhook-id"], body) for headers, body in receiver.requests[1:]]
    assert len(tried) == 4
    assert len(set(tried)) == 1
    other = desk.register("bob", receiver.url)
    wrong = {"ids": [f"{other['id']}-1", "x", f"{made['id']}-99"]}
    said = desk.ask("ann", "POST", f"{path}/replay", json=wrong).json()["data"]
    assert [each["done"] for each in said] == [False] * 3
    assert desk.ask("ann", "POST", f"{path}/replay", json={}).status_code == 400


def test_a_key_sends_at_will_so_often_and_an_admin_as_often_as_it_likes(
    desk: Desk, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receivers, "TESTS", 3)
    monkeypatch.setattr(receivers, "MOST_AGAIN", 2)
    ann, bob = desk.register("ann", receiver.url), desk.register("bob", receiver.url)
    tried = [desk.ask("ann", "POST", f"/{ann['id']}/test?wait=0").status_code for _ in range(4)]
    assert tried == [202, 202, 429, 429]
    refused = desk.ask("ann", "POST", json={"url": receiver.url})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= receivers.TEST_SECONDS
    assert len(desk.ask("ann", "GET").json()["data"]) == 1
    # Of others it takes nothing.
    assert desk.ask("bob", "POST", f"/{bob['id']}/test?wait=0").status_code == 202
    assert {desk.ask("root", "POST", f"/{ann['id']}/test?wait=0").status_code for _ in range(5)} == {202}
    desk.send()
    ids = [f"{ann['id']}-{number}" for number in range(1, 4)]
    again = [desk.ask("ann", "POST", f"/{ann['id']}/replay", json={"ids": ids[:count]}) for count in (1, 2, 1, 1)]
    assert [each.status_code for each in again] == [200, 429, 200, 429]
    assert desk.ask("root", "POST", f"/{ann['id']}/replay", json={"ids": ids}).status_code == 200
    assert all(desk.rig.redis.ttl(key) > 0 for key in desk.rig.redis.keys("*spent:*"))


def test_gone_is_switched_off_until_it_is_resumed_or_moves(desk: Desk, receiver: Receiver) -> None:
    receiver.answers = [status(410)]
    made = desk.register("ann", receiver.url)
    path = f"/{made['id']}"
    desk.send()
    shown = desk.ask("ann", "GET", path).json()
    assert (shown["disabled"], shown["disabled_reason"]) == (True, "gone")
    assert desk.ask("ann", "POST", f"{path}/test?wait=0").status_code == 409
    assert desk.ask("ann", "POST", f"{path}/replay", json={"failed": True}).status_code == 409
    desk.happen("a" * 32, "ann")
    desk.send()
    assert len(receiver.requests) == 1
    receiver.answers = [status(200)]
    assert not desk.ask("ann", "POST", f"{path}/resume").json()["disabled"]
    assert desk.ask("ann", "POST", f"{path}/resume").status_code == 409
    assert desk.ask("ann", "POST", f"{path}/test?wait=0").status_code == 202
    desk.send()
    assert len(receiver.requests) == 2
    moved = desk.ask("ann", "PATCH", path, json={"url": f"{receiver.url}/new", "events": ["verification.rejected"]})
    assert (moved.json()["url"], moved.json()["events"]) == (f"{receiver.url}/new", ["verification.rejected"])


def test_what_is_removed_is_told_nothing_more(desk: Desk, receiver: Receiver) -> None:
    made = desk.register("ann", receiver.url)
    desk.happen("a" * 32, "ann")
    assert desk.ask("ann", "DELETE", f"/{made['id']}").json()["deleted"]
    assert desk.ask("ann", "GET", f"/{made['id']}").status_code == 404
    desk.send()
    assert receiver.requests == []
    assert not desk.rig.redis.keys(deliveries.delivery_key("*"))
    assert not desk.rig.redis.keys("*webhook-*:we_*")


def test_a_revoked_key_hears_nothing_more(desk: Desk, receiver: Receiver) -> None:
    desk.register("ann", receiver.url)
    desk.send()
    keys = tuple(key for key in desk.settings.keys if key.name != "ann")
    desk.settings = desk.settings.model_copy(update={"keys": keys})
    desk.happen("a" * 32, "ann")
    desk.send()
    assert [each["type"] for each in bodies(receiver)] == ["webhook.test"]


def test_secrets_are_sealed_where_there_is_a_key(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(storage={"encryption_keys": "A" * 43 + "="}, deliveries=LOCAL)
    made = rig.http.post("/v1/webhooks", json={"url": "https://x.test/"}).json()
    stored = cast(bytes, rig.redis.hget(ENDPOINTS, made["id"]))
    assert isinstance(_decoder.decode(stored), Endpoint)
    assert made["secret"].removeprefix("whsec_").encode() not in stored
    assert made["key"] is None


def test_only_admins_may_register_where_clients_may_not(make_rig: Callable[..., Rig]) -> None:
    desk = Desk(make_rig(keys=KEYS, deliveries={"endpoints": 0}), Settings())
    assert desk.ask("ann", "POST", json={"url": "https://x.test/"}).status_code == 403
    desk.register("root", "https://x.test/")
