"""Backends that are changed while everything runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from policies.overlay import HIDDEN
from policies.unit import declaration_name
from tests.proxy.admin.conftest import House, eventually
from tests.support import wire
from tests.support.fake_backend import FakeBackend, Until
from verifier_pool.link.overlays import BACKENDS
from verifier_pool.link.queue import standing_key


def test_what_the_file_says_is_shown(house: House) -> None:
    shown = house.backend()
    assert (shown["id"], shown["model"], shown["from"], shown["state"]) == ("b1", "m", "settings", "trial")
    assert shown["settings"]["runtime"] == "vllm-0.32-v2"
    assert shown["health"]["up"]
    assert house.admin.get("/admin/backends/none").json()["error"]["code"] == "backend_not_found"


def test_one_that_is_added_serves_at_once(house: House, second: FakeBackend) -> None:
    second.script = [wire.whole(wire.BODY)]
    added = house.admin.post(
        "/admin/backends",
        json={"name": "new", "url": second.url, "model": "m", "served_model": "served", "api_key": "sk-upstream"},
    )
    assert added.status_code == 201
    assert added.json()["settings"]["api_key"] == HIDDEN
    assert added.json()["from"] == "redis"
    assert house.admin.post("/admin/backends/b1/drain").json()["drained"]
    assert house.chat().status_code == 200
    assert second.last.headers[b"authorization"] == b"Bearer sk-upstream"
    assert house.admin.post("/admin/backends", json={"name": "new", "url": "http://x", "model": "m"}).status_code == 409


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"name": "x y", "url": "http://x", "model": "m"}, "name"),
        ({"url": "http://x", "model": "m"}, "name"),
        ({"name": 7, "url": "http://x", "model": "m"}, "name"),
        ({"name": "x", "model": "m"}, "url"),
        ({"name": "x", "url": "gopher://x", "model": "m"}, "url"),
        ({"name": "x", "url": "http://", "model": "m"}, "url"),
        ({"name": "x", "url": "http://x", "model": "unknown"}, "model"),
        ({"name": "x", "url": "http://x", "model": "m", "max_concurrency": -1}, "max_concurrency"),
        ({"name": "x", "url": "http://x", "model": "m", "colour": "red"}, "colour"),
        ({"name": "x", "url": "http://x", "model": "m", "api_key": "a b"}, "api_key"),
        ({"name": "..", "url": "http://x", "model": "m"}, "name"),
        ({"name": "none", "url": "http://x", "model": "m"}, "name"),
        ({"name": "x", "url": "http://x?token=secret", "model": "m"}, "url"),
        ({"name": "x", "url": "http://x", "model": "m", "runtime": "x\n\0"}, "runtime"),
    ],
)
def test_what_cannot_be_is_refused_by_name(house: House, body: dict[str, Any], key: str) -> None:
    refused = house.admin.post("/admin/backends", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, key)
    assert (house.names(), house.redis.exists(BACKENDS)) == (["b1"], 0)


def test_a_drained_one_finishes_what_it_has_and_gets_no_more(house: House, backend: FakeBackend) -> None:
    go = threading.Event()
    backend.script = [wire.SSE_HEAD, wire.chunk(wire.ROLE), Until(go), *wire.stream(wire.FRAMES[1:])[1:]]
    with house.http.stream(
        "POST", "/v1/chat/completions", json={"model": "m", "messages": [], "stream": True}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert house.admin.post("/admin/backends/b1/drain").json()["outstanding"] == 1
        refused = house.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "backend_unavailable")
        go.set()
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    eventually(lambda: house.backend()["outstanding"] == 0)
    assert len(backend.requests) == 1
    backend.script = [wire.whole(wire.BODY)]
    assert not house.admin.post("/admin/backends/b1/undrain").json()["drained"]
    assert house.chat().status_code == 200


def test_other_settings_hold_for_what_begins_and_count_what_runs(house: House, backend: FakeBackend) -> None:
    go = threading.Event()
    backend.script = [Until(go), wire.whole(wire.BODY)]
    answers: list[httpx.Response] = []
    running = threading.Thread(target=lambda: answers.append(house.chat()))
    running.start()
    eventually(lambda: house.backend()["outstanding"] == 1)
    changed = house.admin.patch("/admin/backends/b1", json={"max_concurrency": 1, "api_key": "sk-other"}).json()
    assert (changed["from"], changed["settings"]["max_concurrency"], changed["outstanding"]) == ("both", 1, 1)
    waiting = threading.Thread(target=lambda: answers.append(house.chat()))
    waiting.start()
    group = house.proxy.services.backends.groups["m"]
    eventually(lambda: len(group.waiting) == 1)
    go.set()
    running.join()
    waiting.join()
    assert [each.status_code for each in answers] == [200, 200]
    assert b"authorization" not in backend.requests[0].headers
    assert backend.requests[1].headers[b"authorization"] == b"Bearer sk-other"
    eventually(lambda: house.backend()["outstanding"] == 0)


def test_who_waits_for_one_that_is_taken_away_is_told(house: House, backend: FakeBackend) -> None:
    go = threading.Event()
    backend.script = [Until(go), wire.whole(wire.BODY)]
    house.admin.patch("/admin/backends/b1", json={"max_concurrency": 1})
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(house.chat())) for _ in range(2)]
    group = house.proxy.services.backends.groups["m"]
    for each in threads:
        each.start()
    eventually(lambda: len(group.waiting) == 1)
    assert house.admin.delete("/admin/backends/b1").json() == {
        "id": "b1",
        "object": "backend",
        "deleted": True,
        "holds": True,
    }
    eventually(lambda: [each.status_code for each in answers] == [503])
    go.set()
    for each in threads:
        each.join()
    assert [each.status_code for each in answers] == [503, 200]
    assert house.chat().status_code == 404


def test_changes_reach_every_proxy_and_survive_both(
    open_house: Callable[..., House], second: FakeBackend, backend: FakeBackend
) -> None:
    one, other = open_house(), open_house()
    one.admin.post("/admin/backends", json={"name": "new", "url": second.url, "model": "m"})
    one.admin.post("/admin/backends/b1/drain")
    assert one.names() == ["b1", "new"]
    eventually(lambda: other.names() == ["b1", "new"] and other.backend()["drained"])
    other.admin.delete("/admin/backends/b1")
    eventually(lambda: one.names() == ["new"])
    later = open_house()
    assert later.names() == ["new"]
    later.admin.post("/admin/backends/b1/reset")
    eventually(lambda: all(each.names() == ["b1", "new"] and not each.backend()["drained"] for each in (one, other)))
    assert other.backend()["from"] == "settings"


def test_what_was_written_and_does_not_hold_here_yet_is_said(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(_: Any) -> bool:
        return False

    new = {"name": "new", "url": "http://127.0.0.1:9", "model": "m"}
    with monkeypatch.context() as patched:
        patched.setattr("proxy.following.Following._hear", deaf)
        added = house.admin.post("/admin/backends", json=new)
        changed = house.admin.patch("/admin/backends/new", json={"max_concurrency": 3})
        drained = house.admin.post("/admin/backends/b1/drain")
        deleted = house.admin.delete("/admin/backends/b1")
        assert house.names() == ["b1"]
    for each in (added, changed, drained, deleted):
        assert (each.status_code, each.json()["holds"]) == (202, False)
    assert (added.json()["id"], changed.json()["settings"]["max_concurrency"]) == ("new", 3)
    assert (drained.json()["drained"], deleted.json()["deleted"]) == (True, True)
    eventually(lambda: house.names() == ["new"])


def test_what_was_done_and_may_be_lost_is_said(open_house: Callable[..., House]) -> None:
    house = open_house(durability={"aof": True})
    drained = house.admin.post("/admin/backends/b1/drain")
    assert (drained.status_code, drained.json()["drained"], drained.json()["durable"]) == (202, True, False)
    assert "it was done" in drained.json()["note"]
    assert house.backend()["drained"]
    for path, body in (("quarantine", {"why": "x"}), ("standing", {"action": "release", "why": "x"})):
        decided = house.admin.post(f"/admin/backends/b1/{path}", json=body)
        assert (decided.status_code, decided.json()["durable"]) == (202, False)
        assert decided.json()["state"] == ("quarantined" if path == "quarantine" else "trial")


def test_a_key_is_sent_to_no_address_that_it_was_not_given_for(house: House, second: FakeBackend) -> None:
    second.script = [wire.whole(wire.BODY)]
    (entry,) = house.tree["backends"]
    house.change(backends=[entry | {"api_key": "sk-of-the-file"}])
    eventually(lambda: house.backend()["settings"]["api_key"] == HIDDEN)
    refused = house.admin.patch("/admin/backends/b1", json={"url": second.url})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "api_key")
    assert house.admin.patch("/admin/backends/b1", json={"url": f"{entry['url']}/v1"}).status_code == 200
    assert house.backend()["settings"]["api_key"] == HIDDEN
    moved = house.admin.patch("/admin/backends/b1", json={"url": second.url, "api_key": "sk-of-the-other"})
    assert moved.status_code == 200
    assert house.chat().status_code == 200
    assert second.last.headers[b"authorization"] == b"Bearer sk-of-the-other"
    # Another admin may not send that one elsewhere either.
    assert house.admin.patch("/admin/backends/b1", json={"url": "http://127.0.0.1:9"}).status_code == 400
    assert (
        house.admin.patch("/admin/backends/b1", json={"url": "http://127.0.0.1:9", "api_key": None}).status_code == 200
    )


def test_redis_lies_over_the_file_field_by_field(house: House) -> None:
    house.admin.patch("/admin/backends/b1", json={"max_concurrency": 5})
    (entry,) = house.tree["backends"]
    house.change(backends=[entry | {"max_concurrency": 9, "precision": "fp8"}])
    eventually(lambda: house.backend()["settings"]["precision"] == "fp8")
    assert house.backend()["settings"]["max_concurrency"] == 5
    assert house.admin.post("/admin/backends/b1/reset").json()["settings"]["max_concurrency"] == 9
    assert house.admin.post("/admin/backends/b1/reset").status_code == 404


def test_what_no_longer_fits_the_file_is_left_out_and_keeps_nothing_back(house: House) -> None:
    house.admin.post("/admin/backends", json={"name": "new", "url": "http://127.0.0.1:9", "model": "m"})
    house.change(models={"n": {}}, backends=[house.tree["backends"][0] | {"model": "n"}])
    eventually(lambda: house.names() == ["b1"])
    assert house.get("/admin/backends")["left_out"] == {"new": "model: 'm' is not among models"}
    house.change(models={"m": {}, "n": {}})
    eventually(lambda: house.names() == ["b1", "new"])


def test_rubbish_in_redis_changes_nothing(house: House) -> None:
    house.redis.hset(BACKENDS, mapping={"b1": "{", "odd": '{"fields": 3}', "x": '{"added": true}'})
    house.admin.post("/admin/backends", json={"name": "new", "url": "http://127.0.0.1:9", "model": "m"})
    assert house.names() == ["b1", "new"]
    assert set(house.get("/admin/backends")["left_out"]) == {"x"}


def test_another_declaration_has_another_record(house: House) -> None:
    first = house.backend()
    quarantined = house.admin.post("/admin/backends/b1/quarantine", json={"why": "its provider changed"}).json()
    assert quarantined["state"] == "quarantined"
    assert house.chat().status_code == 503
    declared = house.admin.put("/admin/backends/b1/declaration", json={"precision": "fp8"}).json()
    assert (declared["declaration"]["precision"], declared["state"]) == ("fp8", "trial")
    assert house.chat().status_code == 200
    # The way back leads to the record that there was, and no request gets there meanwhile.
    back = house.admin.put("/admin/backends/b1/declaration", json={"precision": ""}).json()
    assert (back["declaration"], back["state"]) == (first["declaration"], "quarantined")
    assert house.chat().status_code == 503
    assert declaration_name(first["declaration"]).encode() in house.redis.hkeys(standing_key("b1"))
    house.admin.put("/admin/backends/b1/declaration", json={"precision": "int4"})
    house.admin.post("/admin/backends/b1/quarantine", json={"why": "it too"})
    house.admin.delete("/admin/backends/b1")
    lives = house.get("/admin/backends/b1/standing/history")["data"]
    assert [(each["life"], each["declaration"]["precision"]) for each in lives] == [(2, "int4"), (1, "")]
    assert house.admin.get("/admin/backends/nobody/standing/history").status_code == 404
    house.admin.post("/admin/backends/b1/reset")
    wrong = house.admin.put("/admin/backends/b1/declaration", json={"url": "http://x"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "url")


def test_decisions_are_in_both_trails(house: House) -> None:
    for action in ("quarantine", "release"):
        assert house.admin.post(f"/admin/backends/b1/{action}", json={"why": f"to {action}"}).status_code == 200
    assert house.admin.post("/admin/backends/b1/standing", json={"action": "pardon", "why": "w"}).status_code == 200
    trail = house.get("/admin/backends/b1/standing")["trail"]
    assert [(each["by"], each["action"]) for each in trail if each["by"] == "boss"] == [
        ("boss", "quarantine"),
        ("boss", "release"),
        ("boss", "pardon"),
    ]
    entries = house.audit(action="standing.")
    assert [each["action"] for each in entries] == ["standing.pardon", "standing.release", "standing.quarantine"]
    assert (entries[-1]["actor"], entries[-1]["why"], entries[-1]["after"]) == (
        "key:boss",
        "to quarantine",
        {"state": "quarantined"},
    )
    refused = house.admin.post("/admin/backends/b1/release", json={"why": "again"})
    assert refused.status_code == 409
    assert house.audit(action="standing.")[0]["result"] == refused.json()["error"]["message"]
    for why in ("", " ", "two\nlines", "\u202e", "x" * 2000):
        assert house.admin.post("/admin/backends/b1/quarantine", json={"why": why}).status_code == 400
    assert house.admin.post("/admin/backends/b1/promote", json={"why": "w"}).status_code == 404


def test_no_decision_is_without_its_entry(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of the proxy after the decision: both are one step."""

    def lost(*_: Any, **__: Any) -> None:
        raise RedisConnectionError

    monkeypatch.setattr("verifier_pool.link.trail.append", lost)
    decided = house.admin.post("/admin/backends/b1/quarantine", json={"why": "w"})
    assert (decided.status_code, decided.json()["state"]) == (200, "quarantined")
    (entry,) = house.audit(action="standing.")
    assert (entry["before"], entry["after"], entry["result"]) == (
        {"state": "trial"},
        {"state": "quarantined"},
        "done",
    )
    # What is refused cannot be told; that is in the log.
    assert house.admin.post("/admin/backends/b1/quarantine", json={"why": "w"}).status_code == 409


def test_without_redis_nothing_is_changed_and_everything_is_served(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any, **__: Any) -> Any:
        raise RedisConnectionError

    with monkeypatch.context() as patched:
        patched.setattr("redis.connection.Connection.send_packed_command", gone)
        refused = house.admin.post("/admin/backends/b1/drain")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    assert not house.backend()["drained"]
    assert house.chat().status_code == 200
