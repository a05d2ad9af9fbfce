"""Standing over the API: admins see and change it, nobody else learns anything."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import httpx
import msgspec
import orjson
import pytest

from policies import standing
from policies.settings import Settings, hash_key
from policies.standing import Record
from policies.unit import Unit, declaration_name, declaration_of
from tests.proxy.conftest import CHAT, Rig
from tests.support import wire
from tests.support.fake_backend import FakeBackend
from tests.support.running import RunningProxy
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE
from verifier_pool.link import trail
from verifier_pool.link.queue import OUTBOX, STANDINGS, UNFOLDED, event_key, standing_key, units_key
from verifier_pool.standing import Standings

pytestmark = pytest.mark.usefixtures("empty_store")

KEYS = [
    {"name": "ann", "sha256": hash_key("sk-ann")},
    {"name": "root", "sha256": hash_key("sk-root"), "admin": True},
]
ANN, ROOT = ({"authorization": f"Bearer sk-{name}"} for name in ("ann", "root"))
STANDING = "/v1/backends/b1/standing"
QUARANTINE = {"action": "quarantine", "why": "the disk burns"}
WEBHOOK = {"url": "https://example.com/hook", "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}


@pytest.fixture
def rig(make_rig: Callable[..., Rig], second: FakeBackend) -> Rig:
    """Two backends, two keys."""
    rig = make_rig(second.url, keys=KEYS)
    rig.backend.script = second.script = [wire.whole(wire.BODY)]
    return rig


def _settings(rig: Rig) -> Settings:
    return rig.proxy.services.settings


def _unit(rig: Rig, n: int, **fields: Any) -> Unit:
    backend = _settings(rig).backend("b1")
    base: dict[str, Any] = {
        "id": f"{n:032x}",
        "at": time.time(),
        "backend": "b1",
        "declaration": declaration_of(backend),
        "key": "k",
        "unit": f"{n:016x}",
        "prompt": f"{n:016x}",
        "tokens": 10,
        "verdict": "pass",
        "outcomes": {"selection": (0.0, 0.0), "structure": (0.0, 0.0), "withheld": (0.0, 0.0)},
    }
    return Unit(**(base | fields))


def _queue(rig: Rig, *units: Unit) -> None:
    """Leave units behind, as a verdict does."""
    for unit in units:
        rig.redis.rpush(units_key("b1"), msgspec.json.encode(unit))
    rig.redis.sadd(UNFOLDED, "b1")


def _fold(rig: Rig) -> int:
    return Standings(rig.redis, _settings(rig)).fold("b1")


def _record(rig: Rig) -> Record:
    name = declaration_name(declaration_of(_settings(rig).backend("b1")))
    return standing.unpack(cast(bytes, rig.redis.hget(standing_key("b1"), name)))


def _post(rig: Rig, body: Any, headers: dict[str, str] = ROOT) -> httpx.Response:
    return rig.http.post(STANDING, json=body, headers=headers)


def _code(response: httpx.Response) -> tuple[int, str | None]:
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["code"]


def test_every_backend_is_listed(rig: Rig) -> None:
    rig.stand("b2", "suspect", audit_rate=0.25, since=7.5)
    listed = rig.http.get("/v1/backends", headers=ROOT).json()
    assert listed["object"] == "list"
    b1, b2 = listed["data"]
    assert (b1["id"], b1["model"], b1["state"], b1["audit_rate"], b1["since"]) == ("b1", "m", "trial", 1.0, None)
    assert (b2["id"], b2["model"], b2["state"], b2["audit_rate"], b2["since"]) == ("b2", "m", "suspect", 0.25, 7.5)
    assert b1["declaration"]["runtime"] == "vllm-0.32-v2"
    assert "127.0.0.1" not in json.dumps(listed)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/backends"),
        ("GET", "/v1/backends/b1/standing"),
        ("GET", "/v1/backends/none/standing"),
        ("POST", "/v1/backends/b1/standing"),
        ("POST", "/v1/backends/none/standing"),
    ],
)
def test_only_admins(rig: Rig, method: str, path: str) -> None:
    body = json.dumps(QUARANTINE).encode()
    headers = {"content-type": "application/json"}
    for key in (None, "Bearer sk-wrong", "Basic sk-root"):
        refused = rig.http.request(
            method, path, content=body, headers=headers | ({"authorization": key} if key else {})
        )
        assert _code(refused) == (401, "invalid_api_key")
    same = rig.http.get("/v1/backends/other/standing", headers=ANN)
    for content in (body, b"", b"{"):
        denied = rig.http.request(method, path, content=content, headers=headers | ANN)
        assert _code(denied) == (403, "permission_denied")
        assert denied.content == same.content
    assert rig.redis.exists(standing_key("b1"), STANDINGS) == 0


def test_nobody_sends_much_before_being_known(rig: Rig) -> None:
    with socket.create_connection(("127.0.0.1", rig.proxy.port), timeout=PATIENCE) as client:
        client.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n" % STANDING.encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 401")
    large = rig.http.post(STANDING, json=QUARANTINE | {"why": "x" * 100_000}, headers=ROOT)
    assert _code(large) == (413, "request_too_large")


def test_an_unknown_backend(rig: Rig) -> None:
    assert _code(rig.http.get("/v1/backends/b9/standing", headers=ROOT)) == (404, "backend_not_found")
    assert _code(rig.http.post("/v1/backends/b9/standing", json=QUARANTINE, headers=ROOT)) == (404, "backend_not_found")
    assert _code(rig.http.get("/v1/backends/", headers=ROOT))[0] == 404
    assert _code(rig.http.delete(STANDING, headers=ROOT)) == (405, "method_not_allowed")


def test_a_new_backend_has_an_empty_standing(rig: Rig) -> None:
    shown = rig.http.get(STANDING, headers=ROOT).json()
    assert (shown["object"], shown["backend"], shown["state"], shown["life"]) == ("standing", "b1", "trial", 1)
    assert shown["audit_rate"] == 1.0
    assert shown["coverage"]["served"] == 0
    assert shown["accusing"] == []
    assert rig.redis.exists(standing_key("b1")) == 0


def test_the_record_is_shown(rig: Rig) -> None:
    bad = {"selection": (1.0, 0.0), "structure": (0.0, 0.0), "withheld": (0.0, 0.0)}
    _queue(rig, *(_unit(rig, n) for n in range(5)), _unit(rig, 5, outcomes=bad, verdict="reject"))
    assert _fold(rig) == 6
    shown = rig.http.get(STANDING, headers=ROOT).json()
    settings = _settings(rig)
    expected = standing.summary(_record(rig), settings.standing, settings.audit)
    assert shown == orjson.loads(orjson.dumps(expected))
    assert shown["coverage"]["generations"] == 6
    assert [found["id"] for found in shown["accusing"]] == [f"{5:032x}"]


def test_quarantine_and_release(rig: Rig, second: FakeBackend) -> None:
    done = _post(rig, QUARANTINE)
    assert (done.status_code, done.json()["state"]) == (200, "quarantined")
    entry = done.json()["trail"][-1]
    assert (entry["by"], entry["action"], entry["why"]) == ("root", "quarantine", "the disk burns")
    assert (entry["before"], entry["after"]) == ("trial", "quarantined")
    # This proxy knows at once, others within a second, and the workers read the same record.
    for _ in range(4):
        assert rig.http.post("/v1/chat/completions", json=CHAT, headers=ANN).status_code == 200
    assert (len(rig.backend.requests), len(second.requests)) == (0, 4)
    assert rig.http.get(STANDING, headers=ROOT).json()["trail"] == done.json()["trail"]
    assert _code(_post(rig, QUARANTINE)) == (409, "conflict")
    released = _post(rig, {"action": "release", "why": "a false alarm"})
    assert (released.status_code, released.json()["state"]) == (200, "trial")
    assert [entry["action"] for entry in released.json()["trail"]] == ["declare", "quarantine", "release"]
    assert rig.http.get("/v1/backends", headers=ROOT).json()["data"][0]["state"] == "trial"
    assert _code(_post(rig, {"action": "release", "why": "again"})) == (409, "conflict")


def test_another_proxy_hears_of_it(rig: Rig, valkey: Valkey) -> None:
    with RunningProxy(_settings(rig), valkey.url) as other:
        assert _post(rig, QUARANTINE).status_code == 200
        deadline = time.monotonic() + PATIENCE
        while other.services.backends.all[0].standing.state != "quarantined":
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_pardon_begins_another_life(rig: Rig) -> None:
    bad = {"selection": (1.0, 0.0), "structure": (1.0, 0.0), "withheld": (0.0, 0.0)}
    _queue(rig, *(_unit(rig, n, outcomes=bad, verdict="reject", key=f"k{n}") for n in range(40)))
    _fold(rig)
    assert _record(rig).state == "quarantined"
    assert _code(_post(rig, {"action": "release", "why": "please"})) == (409, "conflict")
    pardoned = _post(rig, {"action": "pardon", "why": "they changed the disk"})
    assert (pardoned.status_code, pardoned.json()["state"], pardoned.json()["life"]) == (200, "trial", 2)
    assert pardoned.json()["coverage"]["served"] == 0
    assert [entry["by"] for entry in pardoned.json()["trail"]][-1] == "root"
    _queue(rig, _unit(rig, 100))
    _fold(rig)
    assert _record(rig).number == 2


def test_a_pardon_waits_for_what_is_not_counted(rig: Rig) -> None:
    _queue(rig, _unit(rig, 1))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(_post, rig, {"action": "pardon", "why": "x"})
        time.sleep(0.3)
        assert not asked.done()
        _fold(rig)
        assert asked.result().json()["life"] == 2
    _queue(rig, _unit(rig, 2))
    assert _code(_post(rig, {"action": "pardon", "why": "x"})) == (503, "units_waiting")
    assert _record(rig).number == 2
    assert _post(rig, QUARANTINE).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"action": "quarantine"}',
        b'{"why": "x"}',
        b'{"action": "free", "why": "x"}',
        b'{"action": "quarantine", "why": ""}',
        b'{"action": "quarantine", "why": "  \\n"}',
        b'{"action": "quarantine", "why": 7}',
        b'{"action": "quarantine", "why": "x", "by": "somebody else"}',
        b'{"action": "quarantine", "why": "' + b"x" * 501 + b'"}',
        b'{"action": "quarantine", "why": "\\ud800"}',
        b"[" * 10_000,
    ],
)
def test_bad_bodies(rig: Rig, body: bytes) -> None:
    response = rig.http.post(STANDING, content=body, headers=ROOT | {"content-type": "application/json"})
    assert _code(response)[0] == 400
    assert rig.redis.exists(standing_key("b1"), STANDINGS) == 0


@pytest.mark.parametrize(
    "why",
    [
        *("", " ", "\u3000 \u2003", "\t", "two\nlines", "a\rb", "a\tb", "a\x00", "\x1b[2Jgone", "a\x7f", "a\x9b1m"),
        *("a\u202etxt", "a\u2066b", "a\u200bb", "a\u200f", "\ufeffa", "a\xadb", "a\U000e0041", "a\u2028b", "a\u2029b"),
        *("a\ue000", "a\U0010ffff", "a\u0378", "x" * 501, "\U0001f525" * 501, " " * 500 + "x"),
    ],
)
def test_reasons_that_would_disguise_the_trail(rig: Rig, why: str) -> None:
    refused = _post(rig, QUARANTINE | {"why": why})
    assert _code(refused) == (400, None)
    assert refused.json()["error"]["param"] == "why"
    assert rig.redis.exists(standing_key("b1"), STANDINGS) == 0


@pytest.mark.parametrize("why", ["x" * 500, "\U0001f525" * 500, " Größe 5 µm – 火事 «ok» \u0915\u094d ", "a\xa0b"])
def test_reasons_in_any_language(rig: Rig, why: str) -> None:
    done = _post(rig, QUARANTINE | {"why": why})
    assert (done.status_code, done.json()["trail"][-1]["why"]) == (200, why.strip())


def test_a_web_page_cannot_send_one(rig: Rig) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = rig.http.post(STANDING, content=json.dumps(QUARANTINE), headers=ROOT | {"content-type": kind})
        assert _code(response)[0] == 400


def test_without_keys_this_machine_may(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    done = rig.http.post(STANDING, json=QUARANTINE)
    assert done.json()["trail"][-1]["by"] == "this machine (no keys are set)"
    assert _code(rig.http.get("/v1/backends", headers={"x-forwarded-for": "1.2.3.4"})) == (401, "invalid_api_key")
    for page in ({"host": f"evil.example:{rig.proxy.port}"}, {"origin": "http://evil.example"}):
        refused = rig.http.post(STANDING, json={"action": "release", "why": "x"}, headers=page)
        assert _code(refused) == (401, "invalid_api_key")
    assert rig.http.get(STANDING).json()["state"] == "quarantined"


def test_no_override_is_lost_to_folds(rig: Rig) -> None:
    """Several admins and several workers at once: every override is in the trail, every unit is counted."""
    rounds, units = 12, 240

    def toggle(n: int) -> int:
        action = ("quarantine", "release")[n % 2]
        return _post(rig, {"action": action, "why": f"round {n}"}).status_code

    def work(part: int) -> None:
        for n in range(part * units // 2, (part + 1) * units // 2):
            _queue(rig, _unit(rig, n))
            _fold(rig)

    with ThreadPoolExecutor(6) as pool:
        folding = [pool.submit(work, part) for part in range(2)]
        statuses = [status for _ in range(rounds) for status in pool.map(toggle, range(4))]
        for each in folding:
            each.result()
    _fold(rig)
    assert set(statuses) <= {200, 409, 503}
    record = _record(rig)
    by_hand = [entry for entry in record.trail if entry.by == "root"]
    assert len(by_hand) == statuses.count(200) > 0
    assert record.coverage.generations == units
    assert rig.redis.llen(units_key("b1")) == 0


def test_the_webhook_is_told(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(webhook=WEBHOOK)
    assert rig.http.post(STANDING, json=QUARANTINE).status_code == 200
    (entry,) = cast("list[bytes]", rig.redis.zrange(OUTBOX, 0, -1))
    told = orjson.loads(cast(bytes, rig.redis.get(event_key(entry.decode().removeprefix("event:")))))
    assert (told["type"], told["data"]["backend"]) == ("backend.quarantined", "b1")


def test_a_record_that_cannot_be_read_stays(rig: Rig) -> None:
    name = declaration_name(declaration_of(_settings(rig).backend("b1")))
    rig.redis.hset(standing_key("b1"), name, b"\x93rubbish")
    assert _code(rig.http.get(STANDING, headers=ROOT)) == (500, "standing_unreadable")
    assert _code(_post(rig, QUARANTINE)) == (500, "standing_unreadable")
    assert rig.redis.hget(standing_key("b1"), name) == b"\x93rubbish"


class TestOutage:
    """Redis is away."""

    @pytest.fixture
    def valkey(self) -> Iterator[Valkey]:
        """One that may be stopped."""
        with Valkey() as server:
            yield server

    def test_it_is_said(self, rig: Rig, valkey: Valkey) -> None:
        rig.stand("b1", "suspect")
        valkey.kill()
        assert _code(rig.http.get(STANDING, headers=ROOT)) == (503, "store_unavailable")
        assert _code(_post(rig, QUARANTINE)) == (503, "store_unavailable")
        (b1, _) = rig.http.get("/v1/backends", headers=ROOT).json()["data"]
        assert b1["state"] == "suspect"


def test_what_is_decided_is_in_the_audit_log(rig: Rig) -> None:
    assert rig.http.post(STANDING, json=QUARANTINE, headers=ROOT).status_code == 200
    refused = rig.http.post(STANDING, json=QUARANTINE | {"action": "pardon"}, headers=ANN)
    assert refused.status_code == 403
    (entry,) = trail.read(rig.redis)
    assert (entry["actor"], entry["action"], entry["target"]) == ("key:root", "standing.quarantine", "b1")
    assert (entry["why"], entry["after"], entry["result"]) == ("the disk burns", {"state": "quarantined"}, "done")
