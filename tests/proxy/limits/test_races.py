"""Many requests of one key at once, over two proxies; and a proxy that is killed in between."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import aiohttp
import httpx
import pytest

from proxy.limits.limiter import Admission
from tests.proxy.conftest import CHAT
from tests.proxy.limits.conftest import Door, serving
from tests.support import wire
from tests.support.fake_backend import PeerCloses, Until
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE, wait_until
from verifier_pool.link.keys import counted_keys, id_of

COST = 200
"""`max_tokens` of each request."""


def _all_at_once(door: Door, key: str, count: int, path: str = "/v1/chat/completions", **fields: Any) -> Counter[int]:
    """Statuses of that many requests, sent at the same moment to every proxy in turn."""
    ready = threading.Barrier(count)

    def ask(number: int) -> int:
        ready.wait(PATIENCE)
        return door.ask(key, path, at=number % len(door.proxies), **{"max_tokens": COST, **fields}).status_code

    with ThreadPoolExecutor(count) as pool:
        return Counter(pool.map(ask, range(count)))


def _answer(tokens: int, prompt: int = 4) -> list[bytes]:
    tokens += prompt - 4
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens - prompt, "total_tokens": tokens}
    message = {"role": "assistant", "content": "x"}
    choices = [{"index": 0, "message": message, "finish_reason": "length"}]
    return [wire.whole(json.dumps({"object": "chat.completion", "choices": choices, "usage": usage}).encode())]


@pytest.mark.parametrize("limit", ["tokens", "tokens_per_minute"])
def test_nobody_overspends_together(make_door: Callable[..., Door], limit: str) -> None:
    """Each takes nearly all it may, and only as many are let in as the budget covers."""
    door = make_door(2)
    limits: dict[str, Any] = {limit: 2000}
    key = door.key(**limits)
    wait: list[bytes | float] = [0.3, *_answer(COST)]
    door.backend.script = wait
    statuses = _all_at_once(door, key, 40)
    assert set(statuses) == {200, 429}
    assert 5 <= statuses[200] <= 9
    name = "charged" if limit == "tokens" else "tokens"
    counts: dict[str, Any] = {name: statuses[200] * COST}
    door.eventually(key, **counts)
    assert statuses[200] * COST <= 2000
    assert len(door.backend.requests) == statuses[200]


LONG = "word " * 800
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"chat_template_kwargs": {"date_string": LONG}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "type": "image", "content": LONG}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}),
        ("/v1/chat/completions", {}),
        ("/v1/responses", {"previous_response_id": "resp_1", "input": "x", "max_output_tokens": 1}),
    ],
)
def test_a_prompt_that_is_longer_than_it_looks_overspends_nothing(
    make_door: Callable[..., Door], path: str, fields: dict[str, Any]
) -> None:
    """Wherever the client put it, and whatever is billed for it."""
    door = make_door(2)
    key = door.key(tokens=5000)
    door.backend.script = [0.3, *_answer(5, 3000)]
    statuses = _all_at_once(door, key, 20, path, **{"max_tokens": 1, **fields})
    assert 0 < statuses[200] == 20 - statuses[429]
    use = door.eventually(key, held=0, charged_requests=statuses[200])
    assert use.charged <= 5000


@pytest.mark.parametrize("limit", ["tokens", "tokens_per_minute", "requests_per_minute", "concurrency"])
def test_a_crowd_overspends_nothing(
    make_door: Callable[..., Door], limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    """However many come at the same moment, each is counted, and that so many ask Redis is no outage."""
    caplog.set_level(logging.WARNING)
    door = make_door(2)
    most = 18 if "tokens" not in limit else 18 * COST
    limits: dict[str, Any] = {limit: most}
    key = door.key(**limits)
    wait: list[bytes | float] = [1.0, *_answer(COST)]
    door.backend.script = wait

    async def test() -> Counter[int]:
        headers = {"authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as http:

            async def ask(number: int) -> int:
                url = door.proxies[number % 2].url
                async with http.post(f"{url}/v1/chat/completions", json=CHAT | {"max_tokens": COST}) as answer:
                    return answer.status

            return Counter(await asyncio.gather(*map(ask, range(300))))

    statuses = asyncio.run(test())
    assert set(statuses) == {200, 429}
    assert 12 <= statuses[200] <= 18
    assert len(door.backend.requests) == statuses[200]
    if limit == "tokens":
        door.eventually(key, held=0, under_way=0, charged=statuses[200] * COST)
    assert all("countersign_unlimited_total 0.0" in each.get("/metrics").text for each in door.clients)
    assert [record.message for record in caplog.records if "redis" in record.message] == []


def test_every_round_until_it_is_spent(make_door: Callable[..., Door]) -> None:
    door = make_door(2)
    key = door.key(tokens=3000)
    door.backend.script = _answer(60)
    served = 0
    for _ in range(12):
        served += _all_at_once(door, key, 16)[200]
        door.eventually(key, charged=served * 60, held=0)
    assert 2600 < served * 60 <= 3000


def test_requests_and_places_are_shared(make_door: Callable[..., Door]) -> None:
    door = make_door(2)
    door.backend.script = [0.5, *_answer(60)]
    few = door.key("few", requests_per_minute=7)
    assert _all_at_once(door, few, 30) == {200: 7, 429: 23}
    narrow = door.key("narrow", concurrency=3)
    assert _all_at_once(door, narrow, 30) == {200: 3, 429: 27}
    door.eventually(narrow, under_way=0)
    assert _all_at_once(door, narrow, 3) == {200: 3}


def test_those_that_leave_give_back_what_they_held(make_door: Callable[..., Door]) -> None:
    door = make_door(2)
    key = door.key(tokens=10_000, concurrency=100, tokens_per_minute=10_000)
    door.backend.script = [wire.SSE_HEAD, wire.chunk(wire.ROLE), wire.chunk(wire.CONTENT[0]), PeerCloses()]

    def leave(number: int) -> None:
        client = door.clients[number % 2]
        body = CHAT | {"stream": True, "max_tokens": COST}
        with client.stream(
            "POST", "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
        ) as got:
            assert got.status_code == 200
            pieces = got.iter_bytes()
            next(pieces)

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(leave, range(40)))
    door.eventually(key, under_way=0, held=0)
    assert door.use(key).charged in range(40 * 4, 40 * 5 + 1)
    assert door.use(key).tokens == door.use(key).charged


def test_a_killed_proxy_holds_nothing_for_ever(door: Door, valkey: Valkey, tmp_path: Path) -> None:
    key = door.key(tokens=1000, concurrency=1)
    settings = door.proxies[0].services.settings.model_dump(mode="json", exclude_none=True)
    door.backend.script = [wire.SSE_HEAD, wire.chunk(wire.ROLE), wire.chunk(wire.CONTENT[0]), PeerCloses()]
    body = CHAT | {"stream": True, "max_tokens": COST}
    headers = {"authorization": f"Bearer {key}"}
    with (
        serving(tmp_path, settings | {"redis_url": valkey.url}) as (url, process),
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
        client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as got,
    ):
        pieces = got.iter_bytes()
        next(pieces)
        process.send_signal(signal.SIGKILL)
        process.wait()
    held = door.use(key).held
    assert held > COST
    assert door.ask(key, max_tokens=10).status_code == 429
    _, leases, _ = counted_keys(id_of(door.made[key].sha256))
    ((lease, until),) = cast("list[tuple[bytes, float]]", door.redis.zrange(leases, 0, -1, withscores=True))
    assert 0 < until / 1000 - time.time() <= 60
    door.redis.zadd(leases, {lease: time.time() * 1000 - 1})  # a minute later
    door.backend.script = _answer(60)
    assert door.ask(key, max_tokens=10).status_code == 200
    door.eventually(key, held=0, under_way=0, charged=60)


def test_long_requests_keep_their_place(make_door: Callable[..., Door], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.limits.limiter.LEASE", 0.6)
    monkeypatch.setattr("proxy.limits.limiter._RENEW", 0.2)
    door = make_door()
    key = door.key(tokens=1000, concurrency=1)
    door.backend.script = wire.stream(pause=0.4)
    headers = {"authorization": f"Bearer {key}"}
    body = CHAT | {"stream": True, "max_tokens": COST}
    with door.clients[0].stream("POST", "/v1/chat/completions", json=body, headers=headers) as got:
        seen = []
        for piece in got.iter_bytes():
            if wire.DONE in piece or b"usage" in piece:
                continue
            use = door.use(key)
            seen.append(use.charged)
            assert use.under_way == 1
            assert use.held > COST - 7
            assert door.ask(key, max_tokens=10).status_code == 429
    assert sorted(seen) == seen
    assert 4 <= seen[-1] <= 7, "what was served so far is charged on the way"
    door.eventually(key, charged=7, held=0, under_way=0)


@pytest.mark.parametrize("what", ["used", "keep"])
def test_what_breaks_over_one_request_holds_up_no_other(
    make_door: Callable[..., Door], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """All go on being renewed, and its own place is given back."""
    monkeypatch.setattr("proxy.limits.limiter._RENEW", 0.05)
    door = make_door()
    key = door.key(tokens=1000, concurrency=1)
    go = threading.Event()
    door.backend.script = [wire.SSE_HEAD, *map(wire.chunk, wire.FRAMES[:3]), Until(go)]
    limiter = door.proxies[0].services.limiter
    real, broken = limiter._keep, 0

    async def keep(running: Iterable[Admission]) -> None:
        nonlocal broken
        broken += 1
        if broken < 5:
            raise TypeError("broken")
        await real(running)

    def used(_: object) -> tuple[int, int]:
        nonlocal broken
        broken += 1
        raise OverflowError("broken")

    if what == "keep":
        monkeypatch.setattr(limiter, "_keep", keep)
    else:
        monkeypatch.setattr("proxy.relay.exchange.Exchange.used", used)
    headers = {"authorization": f"Bearer {key}"}
    body = CHAT | {"stream": True, "max_tokens": COST}
    with door.clients[0].stream("POST", "/v1/chat/completions", json=body, headers=headers) as got:
        pieces = got.iter_bytes()
        next(pieces)
        wait_until(lambda: broken > 5)
        if what == "used":
            assert door.use(key).under_way == 1
            assert door.ask(key, max_tokens=10).status_code == 429
        go.set()
    door.eventually(key, held=0, under_way=0)
    monkeypatch.undo()
    door.backend.script = _answer(60)
    assert door.ask(key, max_tokens=10).status_code == 200


@pytest.mark.parametrize("limits", [{"concurrency": 4}, {"tokens": 100_000, "concurrency": 4}])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_whoever_has_an_answer_may_ask_at_once(
    make_door: Callable[..., Door], limits: dict[str, Any], stream: bool
) -> None:
    """Clients that ask one thing after the other never have more under way than there are of them."""
    door = make_door(1)
    key = door.key(**limits)
    door.backend.script = wire.stream() if stream else _answer(20)

    def ask(_: int) -> list[int]:
        return [door.ask(key, stream=stream, max_tokens=COST).status_code for _ in range(15)]

    with ThreadPoolExecutor(4) as pool:
        statuses = Counter(status for each in pool.map(ask, range(4)) for status in each)
    assert statuses == {200: 60}
    door.eventually(key, under_way=0, held=0)


def test_what_is_over_is_settled_before_tokens_are_refused(door: Door) -> None:
    """A budget's last tokens are not held for a request whose answer its client has."""
    key = door.key(tokens=20 * 60 + 2 * COST)
    door.backend.script = _answer(60)
    assert [door.ask(key, max_tokens=COST).status_code for _ in range(20)] == [200] * 20
    door.eventually(key, charged=20 * 60, held=0)
