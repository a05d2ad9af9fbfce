"""The policy `retry` where the other backend fails, is silent or cannot be reached, clients leave, or Redis does."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.proxy.conftest import CHAT, Rig
from tests.proxy.retrying import FIRST_BAD, INLINE, NO_TURNS, NOBODY, OTHER, RETRY, Pair, error_of, pair_of
from tests.support import wire
from tests.support.deadlines import Deadlines
from tests.support.fake_backend import Close, FakeBackend, PeerCloses, Received, Step
from tests.support.running import RunningProxy, settings_for
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE, wait_until
from verifier_pool.link.queue import evidence_key, verdict_key

pytestmark = pytest.mark.usefixtures("empty_store")


def _decided(rig: Rig) -> set[str]:
    return {key.decode().rpartition(":")[2] for key in rig.redis.scan_iter(verdict_key("*"))}


@pytest.fixture
def pair(make_rig: Callable[..., Rig], second: FakeBackend) -> Pair:
    return pair_of(make_rig, second)


def test_one_that_cannot_be_reached_leaves_a_record(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("http://127.0.0.1:9", verification=RETRY, standing=NO_TURNS)
    rig.stand("b2", "suspect")
    rig.backend.script = [wire.whole(wire.BODY)]
    with rig.worker(FIRST_BAD, NOBODY):
        rejected = rig.chat(headers=INLINE).headers["x-countersign-id"]
    wait_until(lambda: len(_decided(rig)) == 2)
    (other,) = _decided(rig) - {rejected}
    verdict = rig.verdict(other)
    assert (verdict["verdict"], verdict["reasons"], verdict["backend"]) == ("unverified", ["no_answer"], "b2")


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        ([Close()], 502, "upstream_failed"),
        ([wire.whole(OTHER)[:-50], Close()], 502, "upstream_failed"),
        ([wire.whole(b'{"error": {"message": "busy"}}', 429)], 429, None),
        ([wire.whole(b'{"error": {"message": "broken"}}', 500)], 500, None),
    ],
)
def test_the_other_one_fails(
    pair: Pair, second: FakeBackend, script: list[bytes | Close], status: int, code: str | None
) -> None:
    rig = pair()
    second.script = script
    with rig.worker(FIRST_BAD, NOBODY):
        response = rig.chat(headers=INLINE)
    assert response.status_code == status
    assert response.json()["error"].get("code") == code
    assert b"One two" not in response.content
    id, rejected = response.headers["x-countersign-id"], response.headers["x-countersign-retried"]
    assert rig.http.get(f"/v1/verifications/{rejected}").json()["verdict"] == "reject"
    rig.recorded(id)


def test_the_total_time_out_holds_for_both(pair: Pair, second: FakeBackend, deadlines: Deadlines) -> None:
    rig = pair(timeouts={"total": 1000.0, "first_byte": 2000.0, "idle": 2000.0})
    second.script = [wire.head(200, "application/json", "content-length: 5000"), b" ", PeerCloses()]
    with ThreadPoolExecutor(1) as pool, rig.worker(FIRST_BAD, NOBODY):
        asked = pool.submit(rig.chat, INLINE)
        # Each of them has one for the head and one for the body; a byte of the second body is there.
        wait_until(lambda: [number for number, _ in deadlines.moved].count(3) == 2)
        deadlines.end()
        response = asked.result()
    first, other = (max(at for number, at in deadlines.moved if number in own) for own in ((0, 1), (2, 3)))
    assert other == pytest.approx(first, abs=1e-6)
    assert (response.status_code, error_of(response)["code"]) == (504, "upstream_timeout")
    assert second.last.peer_closed.wait(PATIENCE)
    assert "upstream_timeout" in rig.evidence(response.headers["x-countersign-id"]).faults


def test_silence_of_the_second_one(pair: Pair, second: FakeBackend, deadlines: Deadlines) -> None:
    rig = pair()
    second.script = deadlines.silence()
    with rig.worker(FIRST_BAD, NOBODY):
        response = rig.chat(headers=INLINE)
    assert (response.status_code, error_of(response)["code"]) == (504, "upstream_timeout")
    assert second.last.peer_closed.wait(PATIENCE)


def _request(rig: Rig) -> socket.socket:
    body = json.dumps(CHAT).encode()
    client = socket.create_connection(("127.0.0.1", rig.proxy.port), timeout=PATIENCE)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-countersign-mode: inline\r\n"
    head += b"content-length: %d\r\n\r\n"
    client.sendall(head % len(body) + body)
    return client


def test_leaving_while_the_first_is_verified(pair: Pair, second: FakeBackend) -> None:
    rig = pair()
    client = _request(rig)
    wait_until(rig.open_ids)
    (id,) = rig.open_ids()
    rig.evidence(id)
    client.close()
    wait_until(lambda: rig.proxy.drain.in_flight == 0)
    rig.decide(id, "reject", NOBODY)
    time.sleep(0.2)
    assert second.requests == []
    assert rig.evidence(id).complete


@pytest.mark.parametrize("phase", ["before its answer", "in its answer", "while it is verified"])
def test_leaving_while_the_second_is_asked(pair: Pair, second: FakeBackend, deadlines: Deadlines, phase: str) -> None:
    rig = pair()
    if phase != "while it is verified":
        second.script = [*([wire.whole(OTHER)[:-50]] if phase == "in its answer" else []), PeerCloses()]
    client = _request(rig)
    wait_until(rig.open_ids)
    (first,) = rig.open_ids()
    rig.evidence(first)
    rig.decide(first, "reject", NOBODY)
    wait_until(lambda: second.requests)
    if phase == "in its answer":
        # The fourth is for the body of the second answer.
        wait_until(lambda: 3 in [number for number, _ in deadlines.moved])
    elif phase == "while it is verified":
        wait_until(lambda: [id for id in rig.open_ids() if id != first and rig.redis.exists(evidence_key(id))])
    client.close()
    wait_until(lambda: rig.proxy.drain.in_flight == 0)
    (other,) = (set(rig.open_ids()) | _decided(rig)) - {first}
    if phase == "before its answer":
        assert rig.verdict(other)["reasons"] == ["client_left"]
    else:
        assert rig.evidence(other).complete == (phase == "while it is verified")
    if phase != "while it is verified":
        assert second.last.peer_closed.wait(PATIENCE)
    assert all(backend.outstanding == 0 for backend in rig.proxy.services.backends.all)


def test_redis_dies_before_the_second_verdict(backend: FakeBackend, second: FakeBackend) -> None:
    with Valkey() as own:

        def kill(_: Received) -> list[Step]:
            own.kill()
            return [wire.whole(OTHER)]

        backend.script, second.script = [wire.whole(wire.BODY)], kill
        settings = settings_for(backend.url, second.url, verification=RETRY, standing=NO_TURNS)
        with RunningProxy(settings, own.url) as proxy, httpx.Client(base_url=proxy.url) as http, own.client() as client:
            rig = Rig(backend, proxy, http, client)
            rig.stand("b2", "suspect")
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(rig.chat, INLINE)
                wait_until(rig.open_ids)
                (id,) = rig.open_ids()
                rig.evidence(id)
                rig.decide(id, "reject", NOBODY)
                response = asked.result()
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "Uno due tre"
    assert response.json()["countersign"]["reasons"] == ["store_unavailable"]
    assert response.headers["x-countersign-retried"] == id
