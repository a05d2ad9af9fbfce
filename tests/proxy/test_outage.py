"""Redis dies, hangs and comes back; requests are served all along."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import orjson
import pytest

from policies.settings import hash_key
from proxy.asking import PATIENCE
from proxy.lanes import Lanes
from tests.proxy.conftest import CHAT, Rig
from tests.support import waiting, wire
from tests.support.fake_backend import FakeBackend, PeerCloses, Until
from tests.support.running import RunningProxy, settings_for
from tests.support.valkey import Valkey
from tests.support.waiting import wait_until
from verifier_pool.link.queue import VERDICTS, intent_key, verdict_key

INLINE = {"x-countersign-mode": "inline"}


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    """One of the test's own, which it may stop."""
    with Valkey() as server:
        yield server


def _back(rig: Rig, timeout: float = waiting.PATIENCE) -> None:
    deadline = time.monotonic() + timeout
    while rig.http.get("/readyz").json()["redis"] != "up":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _metric(rig: Rig, line: str) -> float:
    for row in rig.http.get("/metrics").text.splitlines():
        if row.startswith(line):
            return float(row.rsplit(" ", 1)[1])
    return 0.0


def _assert_unverified(response: httpx.Response) -> None:
    assert response.status_code == 200
    assert response.headers["x-countersign-verdict"] == "unverified"
    assert response.headers["x-countersign-reason"] == "store_unavailable"


async def _asked(*_: object) -> None:
    raise AssertionError("Redis was asked although it is known to be away")


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_outage(
    rig: Rig, valkey: Valkey, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    before = rig.chat()
    assert "x-countersign-verdict" not in before.headers
    rig.recorded(before.headers["x-countersign-id"])
    caplog.set_level(logging.INFO)
    getattr(valkey, how)()

    first = rig.chat()
    _assert_unverified(first)
    with monkeypatch.context() as patch:
        patch.setattr(Lanes, "ask", _asked)
        responses = [rig.chat() for _ in range(20)]
    for response in responses:
        _assert_unverified(response)
        assert response.json()["choices"][0]["message"]["content"] == "One two three"
    inline = rig.chat(headers=INLINE).json()["countersign"]
    assert (inline["verdict"], inline["reasons"]) == ("unverified", ["store_unavailable"])
    rig.backend.script = wire.stream()
    stream = rig.chat(headers=INLINE, stream=True)
    assert b'"store_unavailable"' in stream.content
    assert stream.content.endswith(wire.DONE)
    missing = rig.http.get(f"/v1/verifications/{first.headers['x-countersign-id']}")
    assert (missing.status_code, missing.json()["error"]["code"]) == (503, "store_unavailable")
    ready = rig.http.get("/readyz")
    assert (ready.status_code, ready.json()["redis"]) == (200, "down")
    assert _metric(rig, 'countersign_unrecorded_total{backend="b1",reason="store_unavailable"}') == 23

    valkey.thaw() if how == "freeze" else valkey.start()
    _back(rig)
    for response in (first, *responses, stream):
        id = response.headers["x-countersign-id"]
        verdict = rig.verdict(id)
        assert (verdict["verdict"], verdict["reasons"]) == ("unverified", ["store_unavailable"])
        assert rig.http.get(f"/v1/verifications/{id}").json()["verdict"] == "unverified"
        assert rig.open_until(id) == 0
    rig.backend.script = [wire.whole(wire.BODY)]
    after = rig.chat()
    assert "x-countersign-verdict" not in after.headers
    assert rig.evidence(after.headers["x-countersign-id"]).complete
    about_redis = [record.message for record in caplog.records if "redis" in record.message]
    assert len(about_redis) == 2
    assert "does not answer" in about_redis[0]
    assert "answers again" in about_redis[1]


def test_redis_dies_during_an_answer(rig: Rig, valkey: Valkey) -> None:
    rig.backend.script = wire.stream(pause=0.1)
    with rig.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        id = response.headers["x-countersign-id"]
        assert "x-countersign-verdict" not in response.headers
        valkey.kill()
        assert response.read().endswith(wire.DONE)
    valkey.start()
    assert rig.verdict(id)["reasons"] == ["store_unavailable"]
    assert rig.http.get(f"/v1/verifications/{id}").json()["verdict"] == "unverified"


def test_no_redis_at_the_start(backend: FakeBackend, valkey: Valkey) -> None:
    valkey.kill()
    backend.script = [wire.whole(wire.BODY)]
    settings = settings_for(backend.url, keys=[{"name": "k", "sha256": hash_key("sk-k")}])
    headers = {"authorization": "Bearer sk-k"}
    with RunningProxy(settings, valkey.url) as proxy, httpx.Client(base_url=proxy.url, headers=headers) as http:
        _assert_unverified(http.post("/v1/chat/completions", json=CHAT))
        valkey.start()
        deadline = time.monotonic() + waiting.PATIENCE
        while "x-countersign-verdict" in http.post("/v1/chat/completions", json=CHAT).headers:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_verdicts_arrive_after_an_outage(rig: Rig, valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """The subscription is made again."""
    rig.backend.script = [wire.whole(wire.BODY)]
    valkey.kill()
    rig.chat()
    valkey.start()
    _back(rig)
    wait_until(lambda: rig.redis.pubsub_numsub(VERDICTS)[0][1])
    # Without a subscription a verdict is heard of by polling, and here it would be late.
    monkeypatch.setattr("proxy.news._POLL", 3600.0)
    id = rig.chat().headers["x-countersign-id"]
    rig.evidence(id)
    owner = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    rig.decide(id, "pass", owner)
    assert rig.http.get(f"/v1/verifications/{id}?wait=120").json()["verdict"] == "pass"
    for _ in range(2):
        id = rig.chat().headers["x-countersign-id"]
        telling = threading.Timer(0.1, rig.decide, (id, "pass", owner))
        telling.start()
        assert rig.http.get(f"/v1/verifications/{id}?wait=120").json()["verdict"] == "pass"
        telling.join()


def test_who_waits_for_a_verdict_waits_through_an_outage(rig: Rig, valkey: Valkey) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    id = rig.chat().headers["x-countersign-id"]
    rig.evidence(id)
    valkey.freeze()
    _assert_unverified(rig.chat())
    assert rig.http.get(f"/v1/verifications/{id}").status_code == 503
    thaw = threading.Timer(1.0, valkey.thaw)
    thaw.start()
    answer = rig.http.get(f"/v1/verifications/{id}?wait=4")
    thaw.join()
    assert (answer.status_code, answer.json()["status"]) == (200, "pending")


def test_a_full_redis_is_no_outage(rig: Rig, valkey: Valkey, caplog: pytest.LogCaptureFixture) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    before = rig.chat().headers["x-countersign-id"]
    rig.evidence(before)
    rig.redis.config_set("maxmemory", "1")
    refused = rig.chat()
    _assert_unverified(refused)
    # What makes no room is refused; the reason is stored all the same, and everything else goes on.
    assert rig.verdict(refused.headers["x-countersign-id"])["reasons"] == ["store_unavailable"]
    assert rig.http.get("/readyz").json()["redis"] == "up"
    assert rig.http.get(f"/v1/verifications/{before}").json()["status"] == "pending"
    assert _metric(rig, 'countersign_unrecorded_total{backend="b1",reason="store_unavailable"}') == 1
    rig.redis.config_set("maxmemory", "0")
    assert "x-countersign-verdict" not in rig.chat().headers
    assert not [record for record in caplog.records if "does not answer" in record.message]


def test_what_is_not_durable_is_served_unverified(
    make_rig: Callable[..., Rig], valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(durability={"replicas": 1, "timeout": 0.3})
    rig.backend.script = [wire.whole(wire.BODY)]
    started = time.monotonic()
    first = rig.chat()
    assert time.monotonic() - started > 0.3
    _assert_unverified(first)
    monkeypatch.setattr(Lanes, "ask", _asked)  # nobody else waits for it
    for _ in range(5):
        _assert_unverified(rig.chat())
    assert rig.http.get("/readyz").json()["redis"] == "down"


def test_an_intent_waits_for_the_append_only_file(
    make_rig: Callable[..., Rig], valkey: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(durability={"aof": True, "timeout": 3.0})
    rig.backend.script = [wire.whole(wire.BODY)]
    _assert_unverified(rig.chat())  # it has none
    assert any("appendonly is disabled" in getattr(record, "why", "") for record in caplog.records)
    rig.redis.config_set("appendonly", "yes")
    rig.redis.config_set("appendfsync", "always")
    _back(rig, 15)
    answer = rig.chat()
    assert "x-countersign-verdict" not in answer.headers
    rig.evidence(answer.headers["x-countersign-id"])


def test_workers_too_far_behind(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(verification={"max_backlog": 2})
    rig.backend.script = [wire.whole(wire.BODY)]
    ids = []
    for _ in range(4):
        ids.append(rig.chat().headers["x-countersign-id"])
        rig.recorded(ids[-1])
    assert [isinstance(rig.recorded(id), list) for id in ids] == [True, True, False, False]
    assert rig.verdict(ids[2])["reasons"] == ["backlog"]
    inline = rig.chat(headers=INLINE).json()["countersign"]
    assert (inline["verdict"], inline["reasons"]) == ("unverified", ["backlog"])
    assert _metric(rig, 'countersign_unrecorded_total{backend="b1",reason="backlog"}') == 3


def test_running_generations_do_not_count_as_lost(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(verification={"lost_after": 1})
    over = threading.Event()
    head, *frames = wire.stream()
    rig.backend.script = [head, *frames[:2], Until(over), *frames[2:]]
    with rig.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        id = response.headers["x-countersign-id"]
        intent = rig.redis.get(intent_key(id))
        assert intent is not None
        assert b"One" not in intent
        # However long it runs, it is put off again and again.
        for _ in range(4):
            until = rig.open_until(id)
            wait_until(lambda until=until: rig.open_until(id) > until)  # type: ignore[misc]
        over.set()
        assert b"".join(response.iter_raw()).endswith(wire.DONE)


def test_an_answer_waits_until_redis_has_its_intent(rig: Rig, valkey: Valkey) -> None:
    """The request itself does not."""
    for _ in range(waiting.TRIES):
        rig.backend.reset()
        rig.backend.script = [wire.whole(wire.BODY)]
        rig.chat()
        with ThreadPoolExecutor(1) as pool:
            began = time.monotonic()
            valkey.freeze()
            asked = pool.submit(rig.chat)
            wait_until(lambda: len(rig.backend.requests) == 2)
            time.sleep(0.2)
            early = asked.done()
            valkey.thaw()
            # A Redis that was silent for longer is away.
            in_time = time.monotonic() - began < PATIENCE / 2
            response = asked.result()
        assert not early or not in_time
        if in_time:
            break
        _back(rig)
    assert "x-countersign-verdict" not in response.headers
    assert rig.redis.exists(intent_key(response.headers["x-countersign-id"]))
    assert rig.evidence(response.headers["x-countersign-id"]).complete


def test_who_leaves_before_redis_has_the_intent(rig: Rig, valkey: Valkey) -> None:
    """Its record comes after the intent, and nobody keeps it open."""
    rig.backend.script = [wire.whole(wire.BODY)]
    served = rig.chat().headers["x-countersign-id"]
    rig.backend.reset()
    rig.backend.script = [PeerCloses()]
    valkey.freeze()
    for number in range(5):
        with closing(_connected(rig)):
            wait_until(lambda number=number: len(rig.backend.requests) > number)  # type: ignore[misc]
    wait_until(lambda: all(request.peer_closed.is_set() for request in rig.backend.requests))
    valkey.thaw()
    wait_until(lambda: not rig.proxy.services.store._open)
    wait_until(lambda: rig.open_ids() == [served])
    verdicts = [orjson.loads(rig.redis.get(key)) for key in rig.redis.scan_iter(f"{verdict_key('')}*")]  # type: ignore[arg-type]
    reasons = Counter(reason for verdict in verdicts for reason in verdict["reasons"])
    assert reasons["client_left"] + reasons["store_unavailable"] == 5


@pytest.mark.parametrize("length", [10, 400_000], ids=["small", "large"])
def test_no_comment_comes_before_redis_has_the_intent(
    make_rig: Callable[..., Rig], valkey: Valkey, length: int
) -> None:
    rig = make_rig(relay={"keepalive": 0.05})
    rig.backend.script = [wire.whole(wire.BODY)]
    rig.chat()
    rig.backend.script = wire.stream()
    for _ in range(waiting.TRIES):
        began = time.monotonic()
        valkey.freeze()
        with closing(_connected(rig, stream=True, messages=[{"role": "user", "content": "x" * length}])) as client:
            client.settimeout(0.3)
            try:
                early = client.recv(1)
            except TimeoutError:
                early = b""
            valkey.thaw()
            in_time = time.monotonic() - began < PATIENCE / 2
            client.settimeout(waiting.PATIENCE)
            assert client.recv(65536)
        if in_time:
            break
        _back(rig)
    assert early == b""


def test_what_redis_takes_is_not_the_backends_time(rig: Rig, valkey: Valkey) -> None:
    rig.backend.script = [wire.whole(wire.BODY)]
    rig.chat()
    for _ in range(waiting.TRIES):
        rig.backend.script = wire.stream()
        began = time.monotonic()
        valkey.freeze()
        thaw = threading.Timer(PATIENCE / 4, valkey.thaw)
        thaw.start()
        id = rig.chat(stream=True).headers["x-countersign-id"]
        thaw.join()
        if rig.redis.exists(intent_key(id)) and time.monotonic() - began < PATIENCE / 2:
            break
        _back(rig)
    found = rig.evidence(id)
    assert found.first_token_seconds is not None
    assert found.first_token_seconds < PATIENCE / 4


def _connected(rig: Rig, **fields: Any) -> socket.socket:
    """A request on a connection of its own."""
    body = orjson.dumps(CHAT | fields)
    client = socket.create_connection(("127.0.0.1", rig.proxy.port), timeout=waiting.PATIENCE)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    client.sendall(head + body)
    return client
