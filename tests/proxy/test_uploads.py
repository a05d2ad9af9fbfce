"""Requests' bodies are bounded together, and by what their key may have at once, while they come and afterwards."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest

from policies.settings import hash_key
from tests.proxy.conftest import CHAT, Rig
from tests.proxy.raw import POST, error_of, memory
from tests.support import wire
from tests.support.waiting import PATIENCE, wait_until

_MIB = 1024 * 1024
KEYS = [{"name": name, "sha256": hash_key(f"sk-{name}")} for name in ("a", "b")]


def _begin(rig: Rig, key: str, sent: int, size: int = 8 * _MIB) -> socket.socket:
    """A request of which so many bytes of its body were sent."""
    client = socket.create_connection(("127.0.0.1", rig.proxy.port), timeout=PATIENCE)
    head = b"host: localhost\r\nauthorization: Bearer %s\r\ncontent-length: %d\r\n\r\n" % (key.encode(), size)
    with suppress(ConnectionError):
        client.sendall(POST + head + b'{"a":"' + b"x" * (sent - 6))
    return client


def _rest(client: socket.socket) -> bytes:
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def _large(rig: Rig, key: str, size: int = _MIB) -> Any:
    body = json.dumps(CHAT | {"user": "x" * size}).encode()
    return rig.http.post("/v1/chat/completions", content=body, headers={"authorization": f"Bearer {key}"})


def _holds(rig: Rig, size: int) -> bool:
    return _held(rig) >= size


def _held(rig: Rig) -> int:
    return rig.proxy.services.holding.held


def test_who_fills_memory_is_asked_to_come_again_and_nobody_else(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(bounds={"held_bytes": 16 * _MIB}, keys=KEYS)
    rig.backend.script = [wire.whole(wire.BODY)]
    before = memory()
    with ExitStack() as stack:
        for count in range(1, 3):
            stack.enter_context(_begin(rig, "sk-a", 2 * _MIB - 65536))
            wait_until(partial(_holds, rig, count * (2 * _MIB - 2 * 65536)))
        over = [stack.enter_context(_begin(rig, "sk-a", 2 * _MIB)) for _ in range(12)]
        for client in over:
            answer = _rest(client)
            status, error = error_of(answer)
            assert (status, error["code"]) == (503, "overloaded")
            assert b"\r\nretry-after: 1\r\n" in answer
        assert _held(rig) <= 8 * _MIB
        assert memory() - before < 24 * _MIB
        assert _large(rig, "sk-b").status_code == 200
        assert rig.http.post("/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer sk-a"}).is_success
    wait_until(lambda: _held(rig) == 0)
    holding, uploads = rig.proxy.services.holding, rig.proxy.services.uploads
    assert (holding.shares, holding.keys, uploads.coming) == (0, {}, {})
    assert _large(rig, "sk-a").status_code == 200


@pytest.mark.parametrize("most", [1, 3])
def test_as_many_bodies_come_as_a_key_may_have_requests(make_rig: Callable[..., Rig], most: int) -> None:
    keys = [KEYS[0] | {"limits": {"concurrency": most}}, KEYS[1]]
    rig = make_rig(keys=keys)
    rig.backend.script = [wire.whole(wire.BODY)]
    with ExitStack() as stack:
        for _ in range(most):
            stack.enter_context(_begin(rig, "sk-a", _MIB))
        wait_until(lambda: sum(rig.proxy.services.uploads.coming.values()) == most)
        answer = _rest(stack.enter_context(_begin(rig, "sk-a", _MIB)))
        status, error = error_of(answer)
        assert (status, error["code"], error["type"]) == (429, "rate_limit_exceeded", "requests")
        assert b"\r\nretry-after: 1\r\n" in answer
        assert _large(rig, "sk-b").status_code == 200
    wait_until(lambda: not rig.proxy.services.uploads.coming)
    assert _large(rig, "sk-a").status_code == 200
    assert not rig.proxy.services.uploads.coming


def test_a_body_is_held_until_its_request_is_over(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(keys=KEYS)
    rig.backend.script = [30.0]
    body = json.dumps(CHAT | {"user": "x" * _MIB}).encode()
    with socket.create_connection(("127.0.0.1", rig.proxy.port), timeout=PATIENCE) as client:
        head = b"host: localhost\r\nauthorization: Bearer sk-a\r\ncontent-length: %d\r\n\r\n" % len(body)
        client.sendall(POST + head + body)
        wait_until(lambda: rig.backend.requests)
        assert _held(rig) == len(body)
        assert not rig.proxy.services.uploads.coming
    wait_until(lambda: _held(rig) == 0)


@pytest.mark.parametrize("bad", [b"[1]", b'{"a":' * 100_000, b'{"model":"m","n":1e9}' + b" " * _MIB])
def test_of_a_refused_body_nothing_is_held(rig: Rig, bad: bytes) -> None:
    assert rig.http.post("/v1/chat/completions", content=bad).status_code == 400
    wait_until(lambda: _held(rig) == 0)
    assert rig.proxy.services.holding.shares == 0
