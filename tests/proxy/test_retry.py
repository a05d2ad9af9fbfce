"""The policy `retry`: a rejected answer is not delivered, another backend is asked, and both leave their record."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from policies.settings import hash_key
from proxy.relay.clock import Clock
from tests.proxy.conftest import CHAT, MESSAGES, Rig
from tests.proxy.retrying import ALL_BAD, FIRST_BAD, INLINE, NO_TURNS, NOBODY, OTHER, RETRY, Pair, error_of, pair_of
from tests.support import wire
from tests.support.fake_backend import FakeBackend
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("empty_store")


@pytest.fixture
def pair(make_rig: Callable[..., Rig], second: FakeBackend) -> Pair:
    return pair_of(make_rig, second)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_another_backend_answers(pair: Pair, second: FakeBackend, path: str) -> None:
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
def test_the_public_page_does_not_tell_what_was_rejected(pair: Pair, policy: str) -> None:
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


def test_a_seed_of_the_client_stays_its_own(pair: Pair, second: FakeBackend) -> None:
    rig = pair()
    with rig.worker(FIRST_BAD, NOBODY):
        assert rig.chat(headers=INLINE, seed=7).status_code == 200
    assert json.loads(second.last.body)["seed"] == json.loads(rig.backend.last.body)["seed"] == 7


@pytest.mark.parametrize("word", ["pass", "inconclusive", "withheld", "unaudited", "unverified"])
def test_only_rejected_answers_are_retried(pair: Pair, second: FakeBackend, word: str) -> None:
    rig = pair()
    with rig.worker(word, NOBODY):
        response = rig.chat(headers=INLINE)
    assert response.status_code == 200
    assert "x-countersign-retried" not in response.headers
    assert response.json()["countersign"]["verdict"] == word
    assert second.requests == []


def test_the_openai_client(pair: Pair) -> None:
    rig = pair()
    with openai.OpenAI(base_url=f"{rig.proxy.url}/v1", api_key="k", max_retries=0) as client:
        with rig.worker(FIRST_BAD, hash_key("k")):
            answer = client.chat.completions.create(model="m", messages=MESSAGES, extra_headers=INLINE)
        assert answer.choices[0].message.content == "Uno due tre"
        with rig.worker(ALL_BAD, hash_key("k")), pytest.raises(openai.InternalServerError) as raised:
            client.chat.completions.create(model="m", messages=MESSAGES, extra_headers=INLINE)
    assert raised.value.status_code == 502
    assert raised.value.code == "verification_failed"


def test_two_rejected_answers_are_enough(pair: Pair, second: FakeBackend) -> None:
    with FakeBackend([wire.whole(OTHER)]) as third:
        rig = pair(third.url)
        with rig.worker(ALL_BAD, NOBODY):
            response = rig.chat(headers=INLINE)
        assert response.status_code == 502
        error = error_of(response)
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


def test_no_time_for_another_backend(pair: Pair, second: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert error_of(response)["code"] == "verification_failed"
    id = response.headers["x-countersign-id"]
    assert id in error_of(response)["message"]
    assert "quarantine" not in response.text
    assert "x-countersign-retried" not in response.headers
    assert rig.http.get(f"/v1/verifications/{id}").json()["verdict"] == "reject"
    wait_until(lambda: rig.proxy.drain.in_flight == 0)
    assert len(rig.backend.requests) == 1


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


def test_a_verdict_that_comes_too_late_is_pending(pair: Pair, second: FakeBackend) -> None:
    rig = pair(verification=RETRY | {"inline_wait": 0.2})
    response = rig.chat(headers=INLINE)
    assert (response.status_code, response.json()["countersign"]["status"]) == (200, "pending")
    rig.decide(response.headers["x-countersign-id"], "reject", NOBODY)
    time.sleep(0.2)
    assert second.requests == []


def test_many_at_once(pair: Pair) -> None:
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
