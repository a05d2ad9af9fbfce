"""Answers over a bound: how deep they are, how long their errors are; and what Redis is asked about ids of nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import orjson
import pytest

from tests.proxy.conftest import Rig
from tests.support import wire
from tests.support.waiting import TRIES

OTHERS = "c" * 32
WAITS = "d" * 32
NOBODYS = "e" * 32


def _deep(levels: int) -> bytes:
    """An object that many levels deep."""
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def _asked(rig: Rig, id: str, wait: float) -> tuple[int, bytes, dict[str, int]]:
    """Status and body, and how often Redis was asked by which command for keys of verifications."""
    rig.redis.config_resetstat()
    said = rig.http.get(f"/v1/verifications/{id}", params={"wait": wait})
    stats = cast("dict[str, dict[str, Any]]", rig.redis.info("commandstats"))
    read = ("get", "mget", "exists", "eval", "evalsha", "hget", "hgetall", "strlen")
    return (
        said.status_code,
        said.content,
        {name: stats[f"cmdstat_{name}"]["calls"] for name in read if f"cmdstat_{name}" in stats},
    )


@pytest.mark.parametrize("wait", [0, 5])
def test_ids_of_others_cost_redis_what_ids_of_nobody_cost(rig: Rig, wait: float) -> None:
    rig.decide(OTHERS, "pass", "somebody else")
    rig.redis.set(f"countersign:intent:{WAITS}", orjson.dumps({"id": WAITS, "owner": "somebody else"}), ex=60)
    # What the proxy asks for itself now and then may come in between.
    for _ in range(TRIES):
        nobodys, others, waits = (_asked(rig, id, wait) for id in (NOBODYS, OTHERS, WAITS))
        if nobodys == others == waits and nobodys[2]["mget"] == 1:
            break
    assert nobodys[0] == 404
    assert others == nobodys
    assert waits == nobodys
    assert nobodys[2]["mget"] == 1


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("levels", "code"), [(128, 200), (129, 502), (900, 502), (100_000, 502)])
def test_depth_of_an_answer(rig: Rig, streamed: bool, levels: int, code: int) -> None:
    extra = b'"x":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b","
    if streamed:
        frames = b"".join(wire.FRAMES).replace(b"{", b"{" + extra, 1)
        rig.backend.script = [wire.whole(frames, 200, "text/event-stream")]
    else:
        rig.backend.script = [wire.whole(wire.BODY.replace(b"{", b"{" + extra, 1))]
    said = rig.chat(stream=streamed)
    assert said.status_code == code
    faults = rig.evidence(said.headers["x-countersign-id"]).faults
    if code == 200:
        assert faults == ()
    else:
        assert said.json()["error"]["code"] == "too_deep"
        assert "too_deep" in faults


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", ["application/json", "text/html"])
@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_an_error_that_is_too_long(make_rig: Callable[..., Rig], path: str, kind: str, streamed: bool) -> None:
    rig = make_rig(bounds={"error_bytes": 1000})
    body = b'{"error":{"message":"%s"}}' % (b"x" * 2000)
    rig.backend.script = [wire.whole(body, 500, kind)]
    said = rig.http.post(f"/v1/{path}", json={"model": "m", "messages": [], "stream": streamed})
    assert said.status_code == 502
    assert said.json()["error"]["code"] == "too_large"
    if path == "chat/completions":
        evidence = rig.evidence(said.headers["x-countersign-id"])
        assert "too_large" in evidence.faults
        assert not evidence.complete


def test_an_error_that_is_too_deep(rig: Rig) -> None:
    rig.backend.script = [wire.whole(_deep(129), 500)]
    said = rig.chat()
    assert (said.status_code, said.json()["error"]["code"]) == (502, "too_deep")
    assert "too_deep" in rig.evidence(said.headers["x-countersign-id"]).faults
    rig.backend.script = [wire.whole(_deep(128), 500)]
    said = rig.chat()
    assert (said.status_code, said.content) == (500, _deep(128))


@pytest.mark.parametrize("status", [400, 429, 500])
def test_an_error_within_the_bound_passes(make_rig: Callable[..., Rig], status: int) -> None:
    rig = make_rig(bounds={"error_bytes": 1000})
    body = b'{"error":{"message":"%s"}}' % (b"x" * 900)
    rig.backend.script = [wire.whole(body, status)]
    said = rig.chat()
    assert (said.status_code, said.content) == (status, body)
