"""The policy `retry`: a rejected answer is not delivered, another backend is asked, and both leave their record."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from policies.settings import hash_key
from proxy.relay.clock import Clock
from tests.proxy.conftest import CHAT, MESSAGES, Rig
from tests.support import wire
from tests.support.deadlines import Deadlines
from tests.support.fake_backend import Close, FakeBackend, PeerCloses, Received, Step
from tests.support.running import RunningProxy, settings_for
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE, wait_until
from verifier_pool.link.queue import verdict_key

INLINE = {"x-countersign-mode": "inline"}
RETRY = {"on_reject": "retry"}
OTHER = wire.BODY.replace(b"One two three", b"Uno due tre")
NO_TURNS = {"suspect_share": 0}
NOBODY = hash_key("")
FIRST_BAD = {"b1": "reject", "b2": "pass", "b3": "pass"}
SECOND_BAD = {"b1": "pass", "b2": "reject", "b3": "pass"}
ALL_BAD = {"b1": "reject", "b2": "reject", "b3": "reject"}


def _decided(rig: Rig) -> set[str]:
    return {key.decode().rpartition(":")[2] for key in rig.redis.scan_iter(verdict_key("*"))}


@pytest.fixture(autouse=True)
def _empty(valkey: Valkey) -> None:
    with valkey.client() as client:
        client.flushall()


@pytest.fixture
def pair(make_rig: Callable[..., Rig], second: FakeBackend) -> Callable[..., Rig]:
    """Makes a rig with two or more backends; all but `b1` are suspects without a turn, so `b1` is asked first."""

    def make(*more_urls: str, **sections: Any) -> Rig:
        rig = make_rig(second.url, *more_urls, **{"verification": RETRY, "standing": NO_TURNS} | sections)
        rig.backend.script, second.script = [wire.whole(wire.BODY)], [wire.whole(OTHER)]
        for name in ["b2"] + ["b3"] * len(more_urls):
            rig.stand(name, "suspect")
        return rig

    return make


def _error(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_another_backend_answers(pair: Callable[..., Rig], second: FakeBackend, path: str) -> None:
    rig = pair()
    body = CHAT if "chat" in path else {"model": "m", "prompt": "count"}
    with rig.worker(FIRST_BAD, NOBODY):
        response = rig.http.post(path, json=body, headers=INLINE)
    assert response.status_code == 200
    assert b"One two" not in response.content
    id, rejected = response.headers["x-countersign-id"], response.headers["x-countersign-retried"]
    assert id != rejected
    assert response.headers["x-countersign-verdict"] == "pass"
    assert response.json()["countersign"]["id"] == id
    assert response.json()["countersign"]["backend"] == "b2"
    for each, word, backend in ((rejected, "reject", "b1"), (id, "pass", "b2")):
        verification = rig.http.get(f"/v1/verifications/{each}").json()
        assert (verification["verdict"], verification["backend"]) == (word, backend)
        evidence = rig.evidence(each)
        assert (evidence.id, evidence.backend, evidence.complete) == (each, backend, True)
        assert rig.queued(each)
    asked = [json.loads(backend.last.body) for backend in (rig.backend, second)]
    assert asked[0].pop("seed") != asked[1].pop("seed")
    assert asked[0] == asked[1]
    assert len(rig.backend.requests) == len(second.requests) == 1
    assert not any(name.startswith(b"x-countersign") for name in second.last.headers)
    page = rig.proxy.services.metrics.page(private=True).decode()
    assert 'countersign_retried_total{backend="b1",model="m"} 1.0' in page
    assert "countersign_blocked_total{" not in page
    assert 'countersign_requests_total{backend="b2",model="m",status="200"} 1.0' in page


def _public_counts(rig: Rig, answers: int) -> dict[str, Counter[str]]:
    """What anybody can read of how often something happened, by backend, once all of it is counted."""
    found: dict[str, Counter[str]] = {}

    def read() -> Counter[str]:
        found.clear()
        for family in text_string_to_metric_families(rig.proxy.services.metrics.page().decode()):
            for sample in family.samples:
                if sample.name.endswith(("_total", "_count")) and not sample.name.startswith("process"):
                    labels = dict(sample.labels)
                    counts = found.setdefault(labels.pop("backend", ""), Counter())
                    counts[f"{sample.name} {sorted(labels.items())}"] += int(sample.value)
        return sum(found.values(), Counter())

    # What the recorder counts, and what is counted last of a request.
    awaited = {"gen_ai_client_token_usage_count": 2 * answers, "overhead_first_token_duration_seconds_count": answers}

    def whole() -> bool:
        counts = read()
        return all(sum(count for name, count in counts.items() if each in name) == n for each, n in awaited.items())

    wait_until(whole)
    return found


@pytest.mark.parametrize("policy", ["block", "retry"])
def test_the_public_page_does_not_tell_what_was_rejected(pair: Callable[..., Rig], policy: str) -> None:
    told = []
    for word, status in (("pass", 200), ("reject", 502)):
        rig = pair(verification={"on_reject": policy})
        with rig.worker(word, NOBODY):
            assert rig.chat(headers=INLINE).status_code == status
        told.append(_public_counts(rig, 2 if status == 502 and policy == "retry" else 1))
    passed, rejected = told
    # Each gave one answer, whatever its client then got.
    assert rejected["b1"] == passed["b1"]
    if policy == "retry":
        assert rejected["b2"] == passed["b1"]
    else:
        assert rejected == passed


def test_a_seed_of_the_client_stays_its_own(pair: Callable[..., Rig], second: FakeBackend) -> None:
    rig = pair()
    with rig.worker(FIRST_BAD, NOBODY):
        assert rig.chat(headers=INLINE, seed=7).status_code == 200
    assert json.loads(second.last.body)["seed"] == json.loads(rig.backend.last.body)["seed"] == 7


@pytest.mark.parametrize("word", ["pass", "inconclusive", "withheld", "unaudited", "unverified"])
def test_only_rejected_answers_are_retried(pair: Callable[..., Rig], second: FakeBackend, word: str) -> None:
    rig = pair()
    with rig.worker(word, NOBODY):
        response = rig.chat(headers=INLINE)
    assert response.status_code == 200
    assert "x-countersign-retried" not in response.headers
    assert response.json()["countersign"]["verdict"] == word
    assert second.requests == []


def test_the_openai_client(pair: Callable[..., Rig]) -> None:
    rig = pair()
    with openai.OpenAI(base_url=f"{rig.proxy.url}/v1", api_key="k", max_retries=0) as client:
        with rig.worker(FIRST_BAD, hash_key("k")):
            answer = client.chat.completions.create(model="m", messages=MESSAGES, extra_headers=INLINE)
        assert answer.choices[0].message.content == "Uno due tre"
        with rig.worker(ALL_BAD, hash_key("k")), pytest.raises(openai.InternalServerError) as raised:
            client.chat.completions.create(model="m", messages=MESSAGES, extra_headers=INLINE)
    assert raised.value.status_code == 502
    assert raised.value.code == "verification_failed"


def test_two_rejected_answers_are_enough(pair: Callable[..., Rig], second: FakeBackend) -> None:
    with FakeBackend([wire.whole(OTHER)]) as third:
        rig = pair(third.url)
        with rig.worker(ALL_BAD, NOBODY):
            response = rig.chat(headers=INLINE)
        assert response.status_code == 502
        error = _error(response)
        assert error["code"] == "verification_failed"
        for id in (response.headers["x-countersign-id"], response.headers["x-countersign-retried"]):
            assert id in error["message"]
            assert rig.http.get(f"/v1/verifications/{id}").json()["verdict"] == "reject"
        assert b"Uno" not in response.content
        assert len(rig.backend.requests) + len(second.requests) + len(third.requests) == 2


@pytest.mark.parametrize("why", ["only one", "quarantined", "hinted", "full", "unreachable"])
def test_no_other_backend(make_rig: Callable[..., Rig], backend: FakeBackend, second: FakeBackend, why: str) -> None:
    crowded = {"name": "b2", "url": second.url, "model": "m", "max_concurrency": 1}
    gone = crowded | {"url": "http://127.0.0.1:9"}
    first = {"name": "b1", "url": backend.url, "model": "m"}
    backends = [first] if why == "only one" else [first, gone] if why == "unreachable" else [first, crowded]
    rig = make_rig(backends=backends, verification=RETRY, standing=NO_TURNS)
    rig.backend.script, second.script = [wire.whole(wire.BODY)], [wire.whole(OTHER)]
    if why != "only one":
        rig.stand("b2", "quarantined" if why == "quarantined" else "suspect")
    if why == "full":
        rig.proxy.services.backends.all[1].outstanding = 1
    headers = INLINE | ({"x-countersign-backend": "b1"} if why == "hinted" else {})
    with rig.worker(FIRST_BAD, NOBODY):
        response = rig.chat(headers=headers)
    rig.proxy.services.backends.all[-1].outstanding = 0
    _assert_not_retried(rig, response)
    assert second.requests == []


def test_no_time_for_another_backend(
    pair: Callable[..., Rig], second: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = pair()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(rig.chat, INLINE)
        wait_until(rig.open_ids)
        (id,) = rig.open_ids()
        rig.evidence(id)
        # The total time-out is over before the verdict is there.
        monkeypatch.setattr(Clock, "left", 0.0)
        rig.decide(id, "reject", NOBODY)
        response = asked.result()
    _assert_not_retried(rig, response)
    assert second.requests == []


def _assert_not_retried(rig: Rig, response: httpx.Response) -> None:
    assert response.status_code == 502
    assert _error(response)["code"] == "verification_failed"
    id = response.headers["x-countersign-id"]
    assert id in _error(response)["message"]
    assert "quarantine" not in response.text
    assert "x-countersign-retried" not in response.headers
    assert rig.http.get(f"/v1/verifications/{id}").json()["verdict"] == "reject"
    wait_until(lambda: rig.proxy.drain.in_flight == 0)
    assert len(rig.backend.requests) == 1


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
    pair: Callable[..., Rig], second: FakeBackend, script: list[bytes | Close], status: int, code: str | None
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


@pytest.mark.parametrize("how", ["stream", "async", "buffered"])
def test_never_retried(make_rig: Callable[..., Rig], backend: FakeBackend, second: FakeBackend, how: str) -> None:
    backends = [
        {"name": name, "url": server.url, "model": "m", "routed_experts": "buffer" if how == "buffered" else "stream"}
        for name, server in (("b1", backend), ("b2", second))
    ]
    rig = make_rig(backends=backends, verification=RETRY, standing=NO_TURNS)
    rig.stand("b2", "suspect")
    rig.backend.script = wire.stream() if how == "stream" else [wire.whole(wire.BODY)]
    with rig.worker(FIRST_BAD, NOBODY):
        response = rig.chat(headers={} if how == "async" else INLINE, stream=how != "async")
    assert response.status_code == 200
    assert "x-countersign-retried" not in response.headers
    assert (b'"verdict":"reject"' in response.content) == (how != "async")
    assert second.requests == []


def test_a_verdict_that_comes_too_late_is_pending(pair: Callable[..., Rig], second: FakeBackend) -> None:
    rig = pair(verification=RETRY | {"inline_wait": 0.2})
    response = rig.chat(headers=INLINE)
    assert (response.status_code, response.json()["countersign"]["status"]) == (200, "pending")
    rig.decide(response.headers["x-countersign-id"], "reject", NOBODY)
    time.sleep(0.2)
    assert second.requests == []


def test_the_total_time_out_holds_for_both(pair: Callable[..., Rig], second: FakeBackend, deadlines: Deadlines) -> None:
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
    assert (response.status_code, _error(response)["code"]) == (504, "upstream_timeout")
    assert second.last.peer_closed.wait(PATIENCE)
    assert "upstream_timeout" in rig.evidence(response.headers["x-countersign-id"]).faults


def test_silence_of_the_second_one(pair: Callable[..., Rig], second: FakeBackend, deadlines: Deadlines) -> None:
    rig = pair()
    second.script = deadlines.silence()
    with rig.worker(FIRST_BAD, NOBODY):
        response = rig.chat(headers=INLINE)
    assert (response.status_code, _error(response)["code"]) == (504, "upstream_timeout")
    assert second.last.peer_closed.wait(PATIENCE)


def _request(rig: Rig) -> socket.socket:
    body = json.dumps(CHAT).encode()
    client = socket.create_connection(("127.0.0.1", rig.proxy.port), timeout=PATIENCE)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-countersign-mode: inline\r\n"
    head += b"content-length: %d\r\n\r\n"
    client.sendall(head % len(body) + body)
    return client


def test_leaving_while_the_first_is_verified(pair: Callable[..., Rig], second: FakeBackend) -> None:
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
def test_leaving_while_the_second_is_asked(pair: Callable[..., Rig], second: FakeBackend, phase: str) -> None:
    rig = pair()
    if phase != "while it is verified":
        second.script = [*([wire.whole(OTHER)[:-50]] if phase == "in its answer" else []), PeerCloses()]
    client = _request(rig)
    wait_until(rig.open_ids)
    (first,) = rig.open_ids()
    rig.evidence(first)
    rig.decide(first, "reject", NOBODY)
    wait_until(lambda: second.requests)
    time.sleep(0.1)
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


def test_many_at_once(pair: Callable[..., Rig]) -> None:
    rig = pair()
    with rig.worker(FIRST_BAD, NOBODY), ThreadPoolExecutor(20) as pool:
        responses = list(pool.map(lambda _: rig.chat(headers=INLINE), range(60)))
    ids: list[str] = []
    for response in responses:
        assert response.status_code == 200
        assert response.json()["choices"][0]["message"]["content"] in ("Uno due tre", "One two three")
        if "x-countersign-retried" in response.headers:
            assert response.json()["choices"][0]["message"]["content"] == "Uno due tre"
            ids.append(response.headers["x-countersign-retried"])
        ids.append(response.headers["x-countersign-id"])
        assert response.json()["countersign"]["id"] == ids[-1]
        assert response.json()["countersign"]["verdict"] == "pass"
    assert len(set(ids)) == len(ids)
    assert all(backend.outstanding == 0 for backend in rig.proxy.services.backends.all)
