"""What a limited key gets: its share, the headers that tell of it, and 429 beyond."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from policies.limits import Cost
from policies.settings import ModelSettings
from proxy.limits.estimate import cost_of
from proxy.relay.body import LARGE, Body
from tests.proxy.conftest import CHAT, MESSAGES
from tests.proxy.limits.conftest import Door
from tests.support import wire
from tests.support.fake_backend import Close, PeerCloses, Step, Until
from tests.support.valkey import Valkey
from tests.support.waiting import TRIES, wait_until

LIMITED = ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests")
ANSWER = [wire.whole(wire.BODY, 200, "application/json", "x-ratelimit-limit-requests: 9", "X-RateLimit-Foo: 1")]


def _told(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("x-ratelimit-")}


def _error(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 429
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def test_requests_a_minute(door: Door) -> None:
    key = door.key(requests_per_minute=2)
    door.backend.script = ANSWER
    first, second, third = (door.ask(key) for _ in range(3))
    assert (first.status_code, second.status_code) == (200, 200)
    assert _told(first) == dict(zip(LIMITED, ("2", "1", "1m0s"), strict=True))
    assert second.headers["x-ratelimit-remaining-requests"] == "0"
    error = _error(third)
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    milliseconds = int(third.headers["retry-after-ms"])
    assert 50_000 < milliseconds <= 60_000
    assert int(third.headers["retry-after"]) == -(-milliseconds // 1000)
    assert set(_told(third)) == set(LIMITED)
    assert len(door.backend.requests) == 2


def test_streams_are_told_too(door: Door) -> None:
    key = door.key(requests_per_minute=5, tokens_per_minute=5000)
    door.backend.script = wire.stream()
    response = door.ask(key, stream=True, max_tokens=10)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-ratelimit-limit-tokens"] == "5000"
    assert response.headers["x-ratelimit-remaining-requests"] == "4"
    door.eventually(key, tokens=7)


def test_tokens_a_minute_are_held_and_given_back(door: Door) -> None:
    key = door.key(tokens_per_minute=300)
    door.backend.script = ANSWER
    response = door.ask(key, max_tokens=200)
    assert 50 < int(response.headers["x-ratelimit-remaining-tokens"]) < 100
    door.eventually(key, tokens=7)
    assert door.ask(key, max_tokens=200).status_code == 200
    door.eventually(key, tokens=14)
    too_long = door.ask(key, max_tokens=300)
    assert _error(too_long)["type"] == "tokens"
    assert "retry-after" not in too_long.headers
    assert too_long.headers["x-should-retry"] == "false"
    assert len(door.backend.requests) == 2


def test_answers_of_any_length_take_what_is_left(door: Door) -> None:
    """A client that sets no max_tokens is served, one such request at a time."""
    key = door.key(tokens_per_minute=300)
    door.backend.script = [wire.SSE_HEAD, wire.chunk(wire.ROLE), wire.chunk(wire.CONTENT[0]), PeerCloses()]
    with door.clients[0].stream(
        "POST", "/v1/chat/completions", json=CHAT | {"stream": True}, headers={"authorization": f"Bearer {key}"}
    ) as response:
        pieces = response.iter_bytes()
        next(pieces)
        assert response.headers["x-ratelimit-remaining-tokens"] == "0"
        assert _error(door.ask(key))["code"] == "rate_limit_exceeded"
    door.eventually(key, tokens=5)  # the prompt's four ids, and one
    door.backend.script = ANSWER
    assert door.ask(key).status_code == 200
    door.eventually(key, tokens=12)


def test_requests_at_once(door: Door) -> None:
    key = door.key(concurrency=1)
    door.backend.queue = [[wire.SSE_HEAD, wire.chunk(wire.ROLE), wire.chunk(wire.CONTENT[0]), PeerCloses()]]
    door.backend.script = ANSWER
    headers = {"authorization": f"Bearer {key}"}
    with door.clients[0].stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}, headers=headers) as one:
        pieces = one.iter_bytes()
        next(pieces)
        refused = door.ask(key)
        assert _error(refused)["code"] == "rate_limit_exceeded"
        assert refused.headers["retry-after"] == "1"
        assert door.use(key).under_way == 1
    door.eventually(key, under_way=0)
    assert door.ask(key).status_code == 200


def test_a_budget(door: Door) -> None:
    key = door.key(tokens=220, every="day")
    door.backend.script = ANSWER
    answers = [door.ask(key, max_tokens=100)]
    while answers[-1].status_code == 200:
        done = len(answers)
        door.eventually(key, "day", charged=7 * done, charged_requests=done, held=0)
        answers.append(door.ask(key, max_tokens=100))
    error = _error(answers[-1])
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
    assert answers[-1].headers["x-should-retry"] == "false"
    assert 0 < int(answers[-1].headers["retry-after"]) <= 86_400
    assert answers[0].headers["x-ratelimit-limit-tokens"] == "220"
    assert len(answers) > 5
    assert door.use(key, "day").charged <= 220


def test_a_budget_that_never_starts_again_says_no_when(door: Door) -> None:
    key = door.key(tokens=50, every="never")
    refused = door.ask(key, max_tokens=100)
    assert _error(refused)["code"] == "insufficient_quota"
    assert "retry-after" not in refused.headers
    assert set(_told(refused)) == {"x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens"}


FAILURES: list[tuple[Sequence[Step], int]] = [
    ([Close()], 502),
    ([wire.whole(b'{"error": {"message": "no"}}', 400)], 400),
    ([wire.whole(b'{"error": {"message": "no"}}', 500)], 500),
    ([wire.head(200, "application/json", "content-length: 500"), b'{"choices"', Close()], 502),
    ([wire.SSE_HEAD, wire.chunk(b'data: {"error": {"message": "no", "code": 503}}\n\n'), wire.LAST_CHUNK], 503),
]


@pytest.mark.parametrize(("script", "status"), FAILURES)
@pytest.mark.parametrize("stream", [False, True])
def test_failures_cost_no_tokens(door: Door, script: Sequence[Step], status: int, stream: bool) -> None:
    if status == 503 and not stream:
        pytest.skip("only a stream can begin with an error")
    key = door.key(tokens=1000, tokens_per_minute=1000, requests_per_minute=10)
    door.backend.script = script
    response = door.ask(key, max_tokens=100, stream=stream)
    assert response.status_code == status
    assert response.headers["x-ratelimit-remaining-requests"] == "9"
    door.eventually(key, tokens=0, held=0, charged=0, under_way=0, requests=1)


def test_who_leaves_pays_for_what_was_served(door: Door) -> None:
    key = door.key(tokens=1000, tokens_per_minute=1000)
    door.backend.script = [wire.SSE_HEAD, wire.chunk(b"".join(wire.FRAMES[:3])), PeerCloses()]
    headers = {"authorization": f"Bearer {key}"}
    body = CHAT | {"stream": True, "max_tokens": 500}
    with door.clients[0].stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        pieces = response.iter_bytes()
        next(pieces)
        assert door.use(key).held > 500
    door.eventually(key, charged=6, tokens=6, held=0, under_way=0)


def test_who_leaves_before_anything_came_pays_nothing(door: Door) -> None:
    key = door.key(tokens=1000, tokens_per_minute=1000)
    scripts: list[Sequence[Step]] = [
        [PeerCloses()],
        [wire.head(200, "application/json", "content-length: 500"), b'{"ch', PeerCloses()],
    ]
    for script in scripts:
        door.backend.script = script
        with pytest.raises(httpx.ReadTimeout):
            door.clients[0].post(
                "/v1/chat/completions",
                json=CHAT | {"max_tokens": 500},
                headers={"authorization": f"Bearer {key}"},
                timeout=1.0,
            )
        door.eventually(key, charged=0, tokens=0, held=0, under_way=0)


def test_a_stream_that_breaks_off_costs_what_it_brought(door: Door) -> None:
    key = door.key(tokens=1000)
    door.backend.script = [wire.SSE_HEAD, wire.chunk(b"".join(wire.FRAMES[:2])), Close()]
    assert b"error" in door.ask(key, stream=True, max_tokens=500).content
    door.eventually(key, charged=5, held=0)


def test_the_prompt_counts(door: Door) -> None:
    key = door.key(tokens_per_minute=1000)
    refused = door.ask(key, messages=[{"role": "user", "content": "word " * 2000}], max_tokens=1)
    assert _error(refused)["type"] == "tokens"


def test_a_large_request_is_counted_beside_the_streams(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks at every message of it holds nobody else up."""
    threads = []

    def counting(body: Body, model: ModelSettings) -> Cost:
        threads.append(threading.current_thread().name)
        return cost_of(body, model)

    monkeypatch.setattr("proxy.relay.endpoint.cost_of", counting)
    key = door.key(tokens=10**9)
    door.backend.script = ANSWER
    for size in (1, LARGE):
        assert door.ask(key, messages=[{"role": "user", "content": "x" * size}], max_tokens=1).status_code == 200
    small, large = threads
    assert small != large
    assert threading.main_thread().name not in threads


def test_images_count_as_images(door: Door) -> None:
    key = door.key(tokens_per_minute=5000)
    door.backend.script = ANSWER
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 200_000}}]
    response = door.ask(key, messages=[{"role": "user", "content": content}], max_tokens=10)
    assert response.status_code == 200
    assert int(response.headers["x-ratelimit-remaining-tokens"]) < 4000


def test_n_and_prompts_multiply(door: Door) -> None:
    key = door.key(tokens_per_minute=100_000)
    door.backend.script = ANSWER
    left = int(door.ask(key, n=5, max_tokens=1000).headers["x-ratelimit-remaining-tokens"])
    assert 94_900 < left <= 95_000
    door.eventually(key, tokens=7)
    more = door.ask(key, "/v1/completions", prompt=["a", "b", "c"], n=2, max_tokens=1000)
    assert 93_900 < int(more.headers["x-ratelimit-remaining-tokens"]) <= 94_000


def test_the_models_length_bounds_what_is_open(make_door: Callable[..., Door]) -> None:
    door = make_door(models={"m": {"vocab_size": 1000, "max_model_len": 400}})
    door.backend.script = ANSWER
    key = door.key(tokens=1000)
    assert door.ask(key).headers["x-ratelimit-remaining-tokens"] == "600"
    door.eventually(key, charged=7, held=0)
    small = door.key("small", tokens=399)
    assert _error(door.ask(small))["code"] == "insufficient_quota"
    assert door.ask(small, max_tokens=20).status_code == 200


def test_the_openai_client(door: Door) -> None:
    key = door.key(requests_per_minute=2)
    door.backend.script = ANSWER
    with door.openai(key) as client:
        raw = client.chat.completions.with_raw_response.create(model="m", messages=MESSAGES)
        assert raw.headers["x-ratelimit-remaining-requests"] == "1"
        client.chat.completions.create(model="m", messages=MESSAGES)
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="m", messages=MESSAGES)
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "requests")


def test_the_openai_client_comes_again_when_it_is_told_to(door: Door) -> None:
    key = door.key(concurrency=1)
    over = threading.Event()
    head, *frames = wire.stream()
    door.backend.queue = [[head, *frames[:2], Until(over), *frames[2:]]]
    door.backend.script = ANSWER
    with door.openai(key, max_retries=TRIES) as client, ThreadPoolExecutor(1) as pool:
        stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        began = time.monotonic()
        asked = pool.submit(lambda: client.chat.completions.create(model="m", messages=MESSAGES))
        wait_until(lambda: "countersign_refused_total{" in door.clients[0].get("/metrics").text)
        assert len(door.backend.requests) == 1
        over.set()
        assert [chunk.choices for chunk in stream]
        assert asked.result().usage
        assert time.monotonic() - began > 0.9


def test_refusals_are_counted(door: Door) -> None:
    key = door.key("canary-name", requests_per_minute=1)
    door.backend.script = ANSWER
    for _ in range(3):
        door.ask(key)
    door.ask("sk-none")
    page = door.clients[0].get("/metrics").text
    assert 'countersign_refused_total{reason="requests"} 2.0' in page
    assert 'countersign_refused_total{reason="invalid_api_key"} 1.0' in page
    assert "canary-name" not in page


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_without_redis_there_are_no_limits(door: Door, valkey: Valkey, how: str) -> None:
    key = door.key(requests_per_minute=1, tokens=100)
    door.backend.script = ANSWER
    assert door.ask(key, max_tokens=10).status_code == 200
    getattr(valkey, how)()
    try:
        answers = [door.ask(key, max_tokens=10) for _ in range(3)]
    finally:
        valkey.thaw() if how == "freeze" else valkey.start()
    assert [each.status_code for each in answers] == [200] * 3
    assert not any(_told(each) for each in answers)
    assert "countersign_unlimited_total 3.0" in door.clients[0].get("/metrics").text


def test_what_is_owed_through_an_outage_is_settled_once(door: Door, valkey: Valkey) -> None:
    key = door.key(tokens=1000, tokens_per_minute=1000)
    door.backend.script = wire.stream(pause=0.3)
    headers = {"authorization": f"Bearer {key}"}
    body = CHAT | {"stream": True, "max_tokens": 100}
    with door.clients[0].stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        pieces = response.iter_bytes()
        next(pieces)
        valkey.freeze()
        try:
            assert b"".join(pieces).endswith(wire.DONE)
            time.sleep(3.5)  # longer than anybody waits for an answer
        finally:
            valkey.thaw()
    door.eventually(key, charged=7, charged_requests=1, tokens=7, held=0, under_way=0)
    time.sleep(1)
    door.eventually(key, charged=7, charged_requests=1)


def test_errors_do_not_repeat_what_was_asked(door: Door) -> None:
    key = door.key(tokens=10)
    response = door.ask(key, messages=[{"role": "user", "content": "canary"}], max_tokens=100)
    assert "canary" not in json.dumps(response.json())
    assert key not in response.text
