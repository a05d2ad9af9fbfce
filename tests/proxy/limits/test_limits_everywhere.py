"""What counts against a limit beside answers of the two endpoints that are verified, and whose limits hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from policies.settings import hash_key
from tests.proxy.limits.conftest import Door
from tests.support import wire
from tests.support.fake_backend import Close

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


PASSED: list[tuple[str, dict[str, Any], list[bytes | float], int]] = [
    ("/v1/embeddings", {"input": "x"}, [wire.whole(b'{"usage": {"prompt_tokens": 9, "total_tokens": 9}}')], 9),
    (
        "/v1/responses",
        {"input": "x", "max_output_tokens": 50},
        [wire.whole(b'{"usage": {"input_tokens": 11, "output_tokens": 4}}')],
        15,
    ),
    (
        "/v1/messages",
        {"max_tokens": 50},
        [wire.whole(b'{"usage": {"input_tokens": 11, "cache_read_input_tokens": 3, "output_tokens": 4}}')],
        18,
    ),
    ("/tokenize", {"prompt": "x" * 4000}, [wire.whole(b'{"count": 900}')], 0),
    (
        "/v1/responses",
        {"input": "x", "max_output_tokens": 50, "stream": True},
        [
            wire.SSE_HEAD,
            wire.chunk(b'data: {"type":"response.created","response":{"usage":null}}\n\n'),
            wire.chunk(b'data: {"type":"response.output_text.delta","delta":"a"}\n\n'),
            wire.chunk(
                b'data: {"type":"response.completed","response":{"usage":{"input_tokens":5,"output_tokens":6}}}\n\n'
            ),
            wire.LAST_CHUNK,
        ],
        11,
    ),
    (
        "/v1/messages",
        {"max_tokens": 50, "stream": True},
        [
            wire.SSE_HEAD,
            wire.chunk(b'data: {"type":"message_start","message":{"usage":{"input_tokens":5,"output_tokens":1}}}\n\n'),
            wire.chunk(b'data: {"type":"content_block_delta","delta":{"text":"a"}}\n\n'),
            wire.chunk(b'data: {"type":"message_delta","usage":{"output_tokens":8}}\n\n'),
            wire.chunk(b'data: {"type":"message_stop"}\n\n'),
            wire.LAST_CHUNK,
        ],
        13,
    ),
]


@pytest.mark.parametrize(("path", "fields", "script", "charged"), PASSED)
def test_other_endpoints_are_limited_too(
    door: Door, path: str, fields: dict[str, Any], script: list[bytes | float], charged: int
) -> None:
    key = door.key(requests_per_minute=1, tokens=1000, tokens_per_minute=1000)
    door.backend.script = script
    response = door.ask(key, path, **fields)
    assert response.status_code == 200
    assert response.headers["x-ratelimit-remaining-requests"] == "0"
    door.eventually(key, charged=charged, tokens=charged, held=0)
    assert _error(door.ask(key, path, **fields))["code"] == "rate_limit_exceeded"
    assert len(door.backend.requests) == 1


def test_a_cut_stream_of_another_endpoint_costs_its_deltas(door: Door) -> None:
    key = door.key(tokens=1000)
    delta = wire.chunk(b'data: {"type":"content_block_delta","delta":{"text":"a"}}\n\n')
    start = wire.chunk(b'data: {"type":"message_start","message":{"usage":{"input_tokens":5,"output_tokens":1}}}\n\n')
    door.backend.script = [wire.SSE_HEAD, start, delta, delta, delta, Close()]
    door.ask(key, "/v1/messages", max_tokens=50, stream=True)
    door.eventually(key, charged=8)


def test_bad_requests_are_requests(door: Door) -> None:
    key = door.key(requests_per_minute=2)
    for status in (400, 404):
        response = door.ask(key, n="x" if status == 400 else 1, model=1 if status == 400 else "other")
        assert response.status_code == status
        assert set(_told(response)) == set(LIMITED)
    assert _error(door.ask(key, model="other"))["code"] == "rate_limit_exceeded"


def test_bodies_that_are_too_large_are_requests(make_door: Callable[..., Door]) -> None:
    door = make_door(bounds={"request_bytes": 2000})
    key = door.key(requests_per_minute=1)
    for status in (413, 429):
        response = door.ask(key, user="x" * 5000)
        assert response.status_code == status
        assert response.headers["x-ratelimit-remaining-requests"] == "0"


def test_default_limits_hold_for_keys_without_their_own(make_door: Callable[..., Door]) -> None:
    keys = [
        {"name": "a", "sha256": hash_key("sk-a")},
        {"name": "b", "sha256": hash_key("sk-b"), "limits": {"requests_per_minute": 2}},
        {"name": "c", "sha256": hash_key("sk-c"), "limits": {}},
    ]
    door = make_door(keys=keys, limits={"requests_per_minute": 1})
    door.backend.script = ANSWER
    door.key("d")
    for key, served in (("sk-a", 1), ("sk-b", 2), ("sk-c", 4), (next(iter(door.made)), 1)):
        assert [door.ask(key).status_code for _ in range(4)] == [200] * served + [429] * (4 - served)


def test_default_limits_hold_for_this_machine(make_door: Callable[..., Door]) -> None:
    door = make_door(keys=[], limits={"requests_per_minute": 1})
    door.backend.script = ANSWER
    assert [door.ask("any").status_code, door.ask("other").status_code] == [200, 429]


def test_without_limits_redis_hears_nothing_of_them(door: Door) -> None:
    key = door.key(concurrency=None)
    door.backend.script = ANSWER
    door.ask(key)
    response = door.ask(key)
    assert response.headers["x-ratelimit-limit-requests"] == "9"  # the backend's own
    names = [name.decode() for name in door.redis.keys("{countersign}:*")]  # type: ignore[union-attr]
    assert not [name for name in names if name.split(":")[1] in ("limit", "leases", "spent", "settled")]
